"""AgileRL's documented behaviour as slow loops: sequences of episodes, and n-step windows."""

from __future__ import annotations

from typing import Any


def sequences(dones: list[list[bool]], length: int | None, kind: str) -> list[list[int]]:
    """Return the rows t·N + n of every sequence, ordered by environment and time; `dones` is [T][N]."""
    found = []
    for env in range(len(dones[0])):
        episode: list[int] = []
        for t, done in enumerate(dones):
            episode.append(t * len(dones[0]) + env)
            if done[env] or t == len(dones) - 1:
                found += _cut(episode, length, kind)
                episode = []
    return found


def _cut(episode: list[int], length: int | None, kind: str) -> list[list[int]]:
    if length is None or len(episode) < length:
        return [episode]
    step = {"chunked": length, "maximum": 1, "fifty_percent_overlap": max(length // 2, 1)}[kind]
    return [episode[start : start + length] for start in range(0, len(episode) - length + 1, step)]


def n_steps(steps: list[dict[str, Any]], n: int, gamma: float) -> list[dict[str, Any]]:
    """Return an n-step transition for every step of one environment that starts n known steps."""
    fused = []
    for start in range(len(steps) - n + 1):
        window = steps[start : start + n]
        ends = [i for i, step in enumerate(window) if step["done"]]
        last = ends[0] if ends else n - 1
        reward = sum(gamma**i * step["reward"] for i, step in enumerate(window[: last + 1]))
        fused.append({**steps[start], "reward": reward, "next_obs": window[last]["next_obs"], "done": bool(ends)})
    return fused
