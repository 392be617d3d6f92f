"""Stable-Baselines3's buffers on this library's core, for `rollout_buffer_class=` and `replay_buffer_class=`.

    from relive.compat.stable_baselines3 import ReplayBuffer
    SAC("MlpPolicy", "Pendulum-v1", replay_buffer_class=ReplayBuffer).learn(5_000)

Signatures, sample types and meanings are those of Stable-Baselines3, whose algorithms need no change. Different are:
observations are stored once and so where an episode ends its last observation takes a row of `buffer_size`; arrays like
`observations` are read-only copies; `optimize_memory_usage` changes nothing and goes with everything else.
"""

from relive.errors import explain

try:
    import stable_baselines3  # noqa: F401 # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError(
        explain(
            "relive.compat.stable_baselines3",
            "stable-baselines3 to be installed",
            error,
            'Run pip install ".[sb3]" in a clone of relive.',
        )
    ) from error

from relive.compat.stable_baselines3.algorithms import PrioritizedDQN, PrioritizedSAC, PrioritizedTD3
from relive.compat.stable_baselines3.hindsight import HerReplayBuffer
from relive.compat.stable_baselines3.prioritized import PrioritizedReplayBuffer, PrioritizedReplayBufferSamples
from relive.compat.stable_baselines3.replay import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from relive.compat.stable_baselines3.rollout import DictRolloutBuffer, RolloutBuffer

__all__ = [
    "DictReplayBuffer",
    "DictRolloutBuffer",
    "HerReplayBuffer",
    "NStepReplayBuffer",
    "PrioritizedDQN",
    "PrioritizedReplayBuffer",
    "PrioritizedReplayBufferSamples",
    "PrioritizedSAC",
    "PrioritizedTD3",
    "ReplayBuffer",
    "RolloutBuffer",
]
