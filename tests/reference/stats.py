"""Episode statistics written out: one environment and one step at a time, in Python numbers."""

from __future__ import annotations

import math
from typing import Any


class EpisodeStats:
    def __init__(self, num_envs: int, window: int, metrics: tuple[str, ...], reasons: tuple[str, ...]) -> None:
        self.num_envs, self.window, self.metrics, self.reasons = num_envs, window, metrics, reasons
        self.finished: list[dict[str, Any]] = []
        self.running: list[list[dict[str, float]]] = [[] for _ in range(num_envs)]
        self.num_steps = 0

    def update(self, rows: list[dict[str, Any] | None]) -> None:
        """Count one row per environment: reward, flags, metrics, reasons. None is ignored."""
        self.num_steps += sum(row is not None for row in rows)
        for env, row in enumerate(rows):
            if row is None:
                continue
            self.running[env].append(row)
            if row["terminated"] or row["truncated"]:
                steps = self.running[env]
                self.finished.append(
                    {
                        "step": self.num_steps,
                        "return": math.fsum(step["reward"] for step in steps),
                        "length": len(steps),
                        **{name: math.fsum(step.get(name, 0.0) for step in steps) for name in self.metrics},
                        "terminated": row["terminated"],
                        "truncated": not row["terminated"],
                        **{name: name in row["reasons"] for name in self.reasons},
                    }
                )
                self.running[env] = []

    def episodes(self) -> list[dict[str, Any]]:
        return self.finished[-self.window :]

    def summary(self) -> dict[str, float]:
        found: dict[str, float] = {"episodes": len(self.finished)}
        episodes = self.episodes()
        if not episodes:
            return found
        for name in ("return", "length", *self.metrics):
            found |= moments(name, [episode[name] for episode in episodes])
        for name, total in (("step_reward", "return"), *((f"step_{name}", name) for name in self.metrics)):
            found |= moments(name, [episode[total] / episode["length"] for episode in episodes])
        for name in ("terminated", "truncated", *self.reasons):
            found[f"{name}_rate"] = sum(episode[name] for episode in episodes) / len(episodes)
        return found


def moments(name: str, values: list[float]) -> dict[str, float]:
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    return {f"{name}_mean": mean, f"{name}_std": std, f"{name}_min": min(values), f"{name}_max": max(values)}
