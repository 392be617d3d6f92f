"""Stable-Baselines3's buffers on this library's core, for `rollout_buffer_class=` and `replay_buffer_class=`.

    from relive.compat.stable_baselines3 import SAC                       # chooses our buffers itself
    from relive.compat.stable_baselines3.common.buffers import ReplayBuffer

Signatures, sample types and meanings are those of Stable-Baselines3, whose algorithms need no change. Every module and
name of it can be imported below this package: what is not ours is its own.
"""

from relive.compat.forwarding import forward, in_place, names_of
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

from relive.compat.stable_baselines3.algorithms import PrioritizedDQN, PrioritizedSAC, PrioritizedTD3
from relive.compat.stable_baselines3.defaults import (
    A2C,
    DDPG,
    DQN,
    PPO,
    SAC,
    TD3,
    OffPolicyAlgorithm,
    OnPolicyAlgorithm,
)
from relive.compat.stable_baselines3.hindsight import HerReplayBuffer
from relive.compat.stable_baselines3.prioritized import PrioritizedReplayBuffer, PrioritizedReplayBufferSamples
from relive.compat.stable_baselines3.replay import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from relive.compat.stable_baselines3.rollout import DictRolloutBuffer, RolloutBuffer

__all__ = [
    "A2C",
    "DDPG",
    "DQN",
    "PPO",
    "SAC",
    "TD3",
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
    "get_system_info",
]

_ours = in_place(
    A2C, DDPG, DQN, PPO, SAC, TD3, OffPolicyAlgorithm, OnPolicyAlgorithm, DictReplayBuffer, DictRolloutBuffer,
    HerReplayBuffer, NStepReplayBuffer, ReplayBuffer, RolloutBuffer,
)  # fmt: skip
forward("stable_baselines3", ours=_ours)

__getattr__ = names_of("stable_baselines3")
