"""rl-buffer's `StatsTracker` on our statistics of episodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from relive.statistics.episodes import EpisodeStats

_MOMENTS = ("mean", "std", "min", "max")


class StatsTracker:
    """Rewards, lengths and further metrics of the last `max_ep_info_buffer` episodes, and why they ended.

    `metrics_keys` are "rewards", "lengths" and the extra ones. `core` is the relive object underneath.
    """

    def __init__(
        self,
        num_envs: int,
        category: str = "Rollout",
        max_ep_info_buffer: int = 100,
        extra_metrics_keys: list[str] | None = None,
        done_reason_keys: list[str] | None = None,
    ) -> None:
        self.num_envs, self.category = num_envs, category
        self.metrics_keys = sorted({"rewards", "lengths", *(extra_metrics_keys or [])})
        self.done_reason_keys = list(done_reason_keys or [])
        self._ours = {key: f"ep_{key}" for key in self.metrics_keys} | {"rewards": "return", "lengths": "length"}
        self._extra = [key for key in self.metrics_keys if key not in ("rewards", "lengths")]
        self.core = EpisodeStats(
            num_envs,
            max_ep_info_buffer,
            metrics=[self._ours[key] for key in self._extra],
            reasons=[f"ep_done_{reason}" for reason in self.done_reason_keys],
        )

    def update(
        self,
        dones: Any,
        rewards: Any,
        infos: Mapping[str, Any] | None = None,
        done_reasons: Sequence[str | None] | None = None,
    ) -> None:
        """Count one step of every environment: `dones`, `rewards` and what `infos` has of the metrics, each `[N]`.

        Rewards `[N, k]` are added up. A reason counts where the episode ends, if it is one of `done_reason_keys`.
        """
        infos, rewards, ended = {} if infos is None else infos, on_host(rewards), on_host(dones) != 0
        if rewards.ndim == 2:
            rewards = rewards.sum(1)
        missing = [None] * self.num_envs
        given = () if done_reasons is None else done_reasons
        reasons = np.array([*given, *missing][: self.num_envs], dtype=object)
        self.core.update(
            rewards,
            ended,
            np.zeros_like(ended),
            metrics={self._ours[key]: on_host(infos[key]) for key in self._extra if key in infos},
            reasons={f"ep_done_{name}": np.asarray(reasons == name, dtype=bool) for name in self.done_reason_keys},
        )

    def reset(self) -> None:
        """Forget all episodes, the running ones too."""
        self.core.clear()

    @property
    def trajectory_num(self) -> int:
        """How many finished episodes the statistics are of."""
        return min(self.core.num_episodes, self.core.window)

    @property
    def ep_info_buffer(self) -> deque[dict[str, float]]:
        """The finished episodes, oldest first: `ep_<metric>`, and `ep_done_<reason>` where it was that."""
        episodes = self.core.episodes()
        named = {f"ep_{key}": episodes[self._ours[key]].tolist() for key in self.metrics_keys}
        reasons = {f"ep_done_{name}": episodes[f"ep_done_{name}"].tolist() for name in self.done_reason_keys}
        infos = (
            {name: float(values[i]) for name, values in named.items()}
            | {name: 1.0 for name, flags in reasons.items() if flags[i]}
            for i in range(self.trajectory_num)
        )
        return deque(infos, maxlen=self.core.window)

    @property
    def _current_episode_stats(self) -> dict[str, np.ndarray]:
        sums = self.core.snapshot()["open"].cpu().numpy()
        return dict(zip(("rewards", "lengths", *self._extra), sums, strict=True))

    def get_statistics(self) -> dict[str, float]:
        """Mean, deviation, smallest and largest of every metric, the same per step, and rates; empty at first."""
        if not self.trajectory_num:
            return {}
        summary = self.core.summary()
        per_step = {key: f"step_{self._ours[key]}" for key in self._extra} | {"rewards": "step_reward"}
        sources = {
            **{f"{key}_{of}": f"{self._ours[key]}_{of}" for key in self.metrics_keys for of in _MOMENTS},
            **{f"done_{reason}_rate": f"ep_done_{reason}_rate" for reason in self.done_reason_keys},
            **{f"step_{key}_{of}": f"{per_step[key]}_{of}" for key in sorted(per_step) for of in _MOMENTS},
        }
        return {f"{self.category}/{theirs}": summary[ours] for theirs, ours in sources.items()}

    def get_raw_values(self) -> dict[str, np.ndarray]:
        """Every metric of every episode `[E]`, and the same per step; empty at first."""
        if not self.trajectory_num:
            return {}
        episodes = self.core.episodes()
        values = {key: episodes[self._ours[key]].double().cpu().numpy() for key in self.metrics_keys}
        values |= {f"step_{key}": x / values["lengths"] for key, x in values.items() if key != "lengths"}
        return {f"{self.category}/{key}": x for key, x in values.items()}


def on_host(value: Any) -> np.ndarray:
    """An array of what may be a tensor on any device."""
    return np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
