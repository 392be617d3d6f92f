"""The scripted environment of the conformance cases, and variants of it."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from relive_conformance.scripted import Script, Scripted, Transition, act, step_and_reset, transitions, vector

__all__ = [
    "Script", "Scripted", "ScriptedDict", "Transition", "act", "critic", "step_and_reset", "transitions", "vector",
]  # fmt: skip


class ScriptedDict(gym.ObservationWrapper[dict[str, Any], Any, np.ndarray]):
    """The scripted environment with a dict observation that contains a tuple."""

    def __init__(self, env: Scripted) -> None:
        super().__init__(env)
        box, count = Scripted.observation_space, gym.spaces.Box(0, 255, (1,), np.uint8)
        self.observation_space = gym.spaces.Dict(state=box, pair=gym.spaces.Tuple((count, count)))

    def observation(self, observation: np.ndarray) -> dict[str, Any]:
        episode, step = observation[1:2].astype(np.uint8), observation[2:3].astype(np.uint8)
        return {"state": observation, "pair": (episode, step)}


def critic(obs: np.ndarray) -> np.ndarray:
    """Return a different value for every observation."""
    return (obs @ np.array([7.0, 3.0, 0.5])).astype(np.float32)
