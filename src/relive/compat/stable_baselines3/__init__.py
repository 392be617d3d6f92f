"""Stable-Baselines3's buffers on relive's core, for `rollout_buffer_class=` and `replay_buffer_class=`.

    from relive.compat.stable_baselines3 import SAC                       # chooses relive's buffers itself
    from relive.compat.stable_baselines3.common.buffers import ReplayBuffer

Signatures, sample types and meanings are those of Stable-Baselines3, whose algorithms need no change.
`relive.compat.patch("stable_baselines3")` lets its own algorithms choose relive's buffers.
"""

from relive.errors import explain

try:
    from stable_baselines3 import get_system_info  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError(
        explain(
            "relive.compat.stable_baselines3",
            "stable-baselines3 to be installed",
            error,
            'Run pip install ".[sb3]" in a clone of relive.',
        )
    ) from error

from relive.compat.stable_baselines3.algorithms import A2C, DDPG, DQN, PPO, SAC, TD3
from relive.compat.stable_baselines3.her.her_replay_buffer import HerReplayBuffer
from relive.compat.stable_baselines3.prioritized import (
    PrioritizedDQN,
    PrioritizedReplayBuffer,
    PrioritizedReplayBufferSamples,
    PrioritizedSAC,
    PrioritizedTD3,
)
from relive.compat.stable_baselines3.replay import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from relive.compat.stable_baselines3.rollout import DictRolloutBuffer, RolloutBuffer

__all__ = [
    "A2C", "DDPG", "DQN", "PPO", "SAC", "TD3", "DictReplayBuffer", "DictRolloutBuffer", "HerReplayBuffer",
    "NStepReplayBuffer", "PrioritizedDQN", "PrioritizedReplayBuffer", "PrioritizedReplayBufferSamples",
    "PrioritizedSAC", "PrioritizedTD3", "ReplayBuffer", "RolloutBuffer", "get_system_info",
]  # fmt: skip
