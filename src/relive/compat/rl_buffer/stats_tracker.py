"""rl-buffer's `StatsTracker`, the statistics of the newest finished episodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from relive.errors import SchemaError, explain

_MOMENTS = ("mean", "std", "min", "max")


class StatsTracker:
    """Rewards, lengths and further metrics of the last `max_ep_info_buffer` episodes, and the reasons why they ended.

    `metrics_keys` are "rewards", "lengths" and `extra_metrics_keys`. `ep_info_buffer` holds the finished episodes,
    oldest first, with the keys `ep_<metric>` and `ep_done_<reason>`; it may be cleared or changed. As in rl-buffer only
    `done` ends an episode; with `truncated_ends=True`, which rl-buffer lacks, `truncated` does, too.
    """

    def __init__(
        self, num_envs: int, category: str = "Rollout", max_ep_info_buffer: int = 100,
        extra_metrics_keys: list[str] | None = None, done_reason_keys: list[str] | None = None, *,
        truncated_ends: bool = False,
    ) -> None:  # fmt: skip
        self.num_envs, self.category = num_envs, category
        self.truncated_ends = truncated_ends
        self.ep_info_buffer: deque[dict[str, float]] = deque(maxlen=max_ep_info_buffer)
        self.metrics_keys = sorted({"rewards", "lengths", *(extra_metrics_keys or [])})
        self.done_reason_keys = list(done_reason_keys or [])
        self._current_episode_stats = {key: np.zeros(num_envs) for key in self.metrics_keys}

    def update(
        self, dones: Any, rewards: Any, infos: Mapping[str, Any] | None = None,
        done_reasons: Sequence[str | None] | None = None,
    ) -> None:  # fmt: skip
        """Update the statistics with one step: `dones`, `rewards` and the extra metrics in `infos`, each `[N]`.

        Rewards `[N, k]` are summed over k, and a single number is used for every environment. A reason counts if the
        episode ends and `done_reason_keys` has it. A call that raises changes nothing.
        """
        rewards, ended = to_numpy(rewards), to_numpy(dones).nonzero()[0]
        if rewards.shape != (self.num_envs,):
            rewards = self._fit_to_envs("rewards", rewards.sum(1) if rewards.ndim == 2 else rewards)
        metrics = self._read_extra_metrics(infos) if infos is not None and len(self.metrics_keys) > 2 else ()
        if len(ended) and ended[-1] >= self.num_envs:
            remedy = "Pass one flag for each environment."
            raise SchemaError(explain("dones", f"{self.num_envs} flags", np.shape(dones), remedy))
        sums = self._current_episode_stats
        sums["rewards"] += rewards
        sums["lengths"] += 1
        for key, values in metrics:
            sums[key] += values
        for env in ended.tolist():
            self._finish_episode(env, () if done_reasons is None else done_reasons)

    def _read_extra_metrics(self, infos: Mapping[str, Any]) -> list[tuple[str, np.ndarray]]:
        extra = [key for key in self.metrics_keys if key in infos and key not in ("rewards", "lengths")]
        return [(key, self._fit_to_envs(key, to_numpy(infos[key]))) for key in extra]

    def _fit_to_envs(self, name: str, values: np.ndarray) -> np.ndarray:
        if values.shape == (self.num_envs,) or values.size == 1:
            return values if values.ndim <= 1 else values.reshape(())
        remedy = "Pass one number for each environment, or one for all."
        raise SchemaError(explain(name, f"shape {(self.num_envs,)}", values.shape, remedy))

    def _finish_episode(self, env: int, done_reasons: Sequence[str | None]) -> None:
        episode: dict[str, float] = {}
        for key, sums in self._current_episode_stats.items():
            episode[f"ep_{key}"] = float(sums[env])
            sums[env] = 0.0
        reason = done_reasons[env] if env < len(done_reasons) else None
        if reason in self.done_reason_keys:
            episode[f"ep_done_{reason}"] = 1.0
        self.ep_info_buffer.append(episode)

    def reset(self) -> None:
        """Remove all episodes, also unfinished ones."""
        for sums in self._current_episode_stats.values():
            sums[:] = 0.0
        self.ep_info_buffer.clear()

    @property
    def trajectory_num(self) -> int:
        """Number of finished episodes in the statistics."""
        return len(self.ep_info_buffer)

    def get_statistics(self) -> dict[str, float]:
        """Return mean, std, min and max of every metric, per episode and per step, and rates; {} without episodes."""
        moments = {
            f"{name}_{moment}": float(getattr(values, moment)()) if values.size else 0.0
            for name, values in self.get_raw_values().items()
            for moment in _MOMENTS
        }
        return {**moments, **self._compute_reason_rates()} if moments else {}

    def _compute_reason_rates(self) -> dict[str, float]:
        episodes = self.ep_info_buffer
        counts = {reason: sum(f"ep_done_{reason}" in each for each in episodes) for reason in self.done_reason_keys}
        return {f"{self.category}/done_{reason}_rate": count / len(episodes) for reason, count in counts.items()}

    def get_raw_values(self) -> dict[str, np.ndarray]:
        """Return two arrays `[E]` per metric, its sum over each episode and its mean per step; {} without episodes."""
        if not self.ep_info_buffer:
            return {}
        episodes = self.ep_info_buffer
        values = {key: np.array([each.get(f"ep_{key}", 0.0) for each in episodes]) for key in self.metrics_keys}
        lengths = np.array([each.get("ep_lengths", 1.0) for each in episodes])
        has_steps = lengths > 0
        values |= {f"step_{key}": x[has_steps] / lengths[has_steps] for key, x in values.items() if key != "lengths"}
        return {f"{self.category}/{key}": x for key, x in values.items()}


def to_numpy(value: Any) -> np.ndarray:
    """Convert a value, or a tensor on any device, to a numpy array."""
    if type(value) is np.ndarray:
        return value
    return value.numpy(force=True) if isinstance(value, torch.Tensor) else np.asarray(value)
