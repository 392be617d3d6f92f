# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
"""`HerReplayBuffer`: Stable-Baselines3's hindsight experience replay."""

from __future__ import annotations

import copy
import warnings
from typing import Any, Literal

import numpy as np
import stable_baselines3.her.her_replay_buffer as sb3
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from stable_baselines3.her.goal_selection_strategy import KEY_TO_GOAL_STRATEGY, GoalSelectionStrategy
from tensordict import TensorDict

from relive.compat.stable_baselines3.observations import has_overrides
from relive.compat.stable_baselines3.replay import CONVERSION_METHODS, DictReplayBuffer
from relive.errors import NotReadyError, SchemaError, explain
from relive.replay.views import Hindsight, View
from relive.schema.fields import Declaration, Field

_STRATEGIES: dict[GoalSelectionStrategy, Literal["future", "final", "episode"]] = {
    GoalSelectionStrategy.FUTURE: "future",
    GoalSelectionStrategy.FINAL: "final",
    GoalSelectionStrategy.EPISODE: "episode",
}
_SAMPLING_METHODS = "_get_samples", "_get_real_samples", "_get_virtual_samples", "_sample_goals", *CONVERSION_METHODS
"""Names of methods that Stable-Baselines3's `sample` calls."""


class HerReplayBuffer(DictReplayBuffer, sb3.HerReplayBuffer):
    """Transitions with goals; `n_sampled_goal` of every `n_sampled_goal + 1` get a goal that their episode reached.

    Rewards come from the environment's `compute_reward`; `dones` are not relabelled. Steps of running or
    partly overwritten episodes are drawn as well: their goals come from the stored part.
    """

    env: VecEnv | None

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Dict,
        action_space: spaces.Space[Any],
        env: VecEnv,
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        n_sampled_goal: int = 4,
        goal_selection_strategy: GoalSelectionStrategy | str = "future",
        copy_info_dict: bool = False,
    ) -> None:
        self.copy_info_dict = copy_info_dict
        self._samples_as_original = has_overrides(self, *_SAMPLING_METHODS)
        """Whether Stable-Baselines3's code makes the batches, because a user's class overrides one of its methods."""
        super().__init__(
            buffer_size,
            observation_space,
            action_space,
            device,
            n_envs,
            optimize_memory_usage,
            handle_timeout_termination,
            next_obs="stored" if self._samples_as_original else "shared",
        )
        self.env = env
        self.goal_selection_strategy = _parse_strategy(goal_selection_strategy)
        self.n_sampled_goal = n_sampled_goal
        self.her_ratio = 1 - 1 / (n_sampled_goal + 1)
        self.infos = np.empty((self.buffer_size, n_envs) if copy_info_dict else (0, n_envs), object)
        self.ep_start, self.ep_length = (np.zeros((self.buffer_size, n_envs), np.int64) for _ in range(2))
        """First position and length of each step's episode; the length of running and overwritten episodes is 0."""
        self._current_ep_start = np.zeros(n_envs, np.int64)

    def _declare_extra_fields(self) -> dict[str, Declaration]:
        return {"place": Field((), torch.int64)} if self.copy_info_dict else {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "env": None}

    def set_env(self, env: VecEnv) -> None:
        """Set the environment that computes rewards; a loaded buffer has no environment."""
        if self.env is not None:
            raise SchemaError(
                explain("set_env", "a buffer without an environment", f"one with {self.env}", "Set it once.")
            )
        self.env = env

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: np.ndarray,
        reward: np.ndarray,
        done: np.ndarray,
        infos: list[dict[str, Any]],
    ) -> None:
        """Store one step of every environment, and with `copy_info_dict` its `infos`."""
        if not self._core_is_current:
            # After writes into the arrays, Stable-Baselines3's own `add` stores the step and tracks its episode.
            super().add(obs, next_obs, action, reward, done, infos)
            return
        position = self.pos
        if self.copy_info_dict:
            self._extra_values["place"] = np.arange(position * self.n_envs, (position + 1) * self.n_envs)
        super().add(obs, next_obs, action, reward, done, infos)
        if self.copy_info_dict:
            self.infos[position] = infos
        self._track_episodes(position, done)

    def _track_episodes(self, position: int, done: np.ndarray) -> None:
        """Update `ep_start` and `ep_length` of the step at `position` and of episodes that it overwrites or ends."""
        overwritten_length = self.ep_length[position]
        if np.count_nonzero(overwritten_length):
            for env in overwritten_length.nonzero()[0]:
                end = self.ep_start[position, env] + self.ep_length[position, env]
                self.ep_length[np.arange(position, end) % self.buffer_size, env] = 0
        self.ep_start[position] = self._current_ep_start
        if np.count_nonzero(done):
            for env in np.asarray(done).nonzero()[0]:
                self._compute_episode_length(int(env))

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Draw random transitions, some with relabelled goals, normalised by `env`."""
        if self._samples_as_original or not self._core_is_current:
            return sb3.HerReplayBuffer.sample(self, batch_size, env)
        return super().sample(batch_size, env)

    def _make_view(self) -> View:
        strategy = _STRATEGIES[self.goal_selection_strategy]
        return Hindsight("desired_goal", "achieved_goal", self._compute_rewards, self.her_ratio, strategy)

    def _compute_rewards(
        self, achieved: torch.Tensor, goal: torch.Tensor, rows: TensorDict
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rewards of steps for relabelled goals, and their unchanged `terminated`."""
        if self.env is None:
            raise NotReadyError(explain("sample", "an environment to compute rewards", None, "Call set_env(env)."))
        infos: Any = [{} for _ in range(len(goal))]
        if self.copy_info_dict:
            infos = copy.deepcopy(self.infos.reshape(-1)[rows["place"].numpy()])
        rewards = self.env.env_method("compute_reward", achieved.numpy(), goal.numpy(), infos, indices=[0])[0]
        return torch.from_numpy(np.asarray(rewards, np.float32).reshape(-1)), rows["terminated"]

    def truncate_last_trajectory(self) -> None:
        """Truncate running episodes, which a loaded buffer does not continue: the next step starts a new episode."""
        if not self._core_is_current:
            sb3.HerReplayBuffer.truncate_last_trajectory(self)
            return
        unfinished = np.flatnonzero(self._current_ep_start != self.pos)
        if len(unfinished):
            warnings.warn(
                # The message keeps Stable-Baselines3's words up to the colon, because its tests match them.
                f"The last trajectory in the replay buffer will be truncated: {len(unfinished)} environments have not "
                "ended it. Where they go on after loading, pass truncate_last_traj=False.",
                stacklevel=2,
            )
            self._rows.cut_episodes(unfinished)
            for env in unfinished:
                self._compute_episode_length(int(env))

    def reset(self) -> None:
        """Remove every transition."""
        super().reset()
        for numbers in (self.ep_start, self.ep_length, self._current_ep_start):
            numbers.fill(0)


def _parse_strategy(choice: GoalSelectionStrategy | str) -> GoalSelectionStrategy:
    strategy = KEY_TO_GOAL_STRATEGY.get(choice.lower()) if isinstance(choice, str) else choice
    if not isinstance(strategy, GoalSelectionStrategy):
        names = ", ".join(KEY_TO_GOAL_STRATEGY)
        raise SchemaError(explain("goal_selection_strategy", f"one of {names}", repr(choice), "Pass one of them."))
    return strategy
