"""One truncation as a timeline: the same few steps under each autoreset mode, and the result of a naive loop.

The environment is a walk whose true values are known exactly, so the right answer is known too: a critic that is
right about everything leaves every advantage at zero. Whatever else comes out is an error of the bookkeeping.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from tensordict import TensorDict
from torch import Tensor

from relive import RolloutBuffer

GAMMA = 0.5
LAM = 1.0
TIME_LIMIT = 3
NUM_TRANSITIONS = 5
"""Number of transitions: the first episode and the start of the second."""


HEADINGS = {
    AutoresetMode.NEXT_STEP: ("the step after an end only resets", "truncated = done, no mask"),
    AutoresetMode.SAME_STEP: ("step() returns the new episode", "takes that for the next obs"),
    AutoresetMode.DISABLED: ("you reset what ended", "truncated = done"),
}
"""What each autoreset mode does, and the mistake of a naive loop under it."""

COLUMNS = {
    "t": 3,
    "obs": 5,
    "reward": 8,
    "step() gave": 9,
    "next obs": 6,
    "flags": 11,
    "mask": 7,
    "advantage": 11,
    "return": 8,
    "naive advantage": 10,
    "": 2,
}
"""Headings of the printed timeline with their widths, 80 characters in total."""


class Walk(gym.Env[np.ndarray, np.int64]):
    """An endless walk: state s pays s + 1 and leads to s + 1."""

    observation_space = gym.spaces.Box(0.0, np.inf, (1,), np.float32)
    action_space = gym.spaces.Discrete(1)

    def __init__(self) -> None:
        self._state = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Go back to state 0."""
        super().reset(seed=seed, options=options)
        self._state = 0
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Move to the next state."""
        del action
        self._state += 1
        return self._observe(), float(self._state), False, False, {}

    def _observe(self) -> np.ndarray:
        return np.array([self._state], dtype=np.float32)


def true_value(obs: Tensor) -> Tensor:
    """Return the values [N] of a perfect critic: V(s) = Σ γ^k (s + 1 + k) = (s + 1) / (1 − γ) + γ / (1 − γ)²."""
    return (obs.squeeze(-1) + 1.0) / (1.0 - GAMMA) + GAMMA / (1.0 - GAMMA) ** 2


@dataclass(frozen=True)
class Timeline:
    """The steps under one autoreset mode and their advantages; every tensor is [T], reset rows included."""

    mode: AutoresetMode
    obs: Tensor
    returned: Tensor
    """Observation that `env.step` returned."""
    next_obs: Tensor
    """State that the step led to, as stored by the buffer."""
    reward: Tensor
    truncated: Tensor
    value: Tensor
    mask: Tensor
    advantage: Tensor
    return_: Tensor
    naive: Tensor
    """Advantage that a naive loop computes for the same row."""

    @property
    def cut(self) -> int:
        """Row at which the time limit truncated the episode."""
        return int(self.truncated.nonzero()[0])


def play(mode: AutoresetMode) -> Timeline:
    """Walk through the truncation under one autoreset mode."""
    env = SyncVectorEnv([lambda: TimeLimit(Walk(), TIME_LIMIT)], autoreset_mode=mode)
    rollout = RolloutBuffer.for_env(env, NUM_TRANSITIONS + (mode is AutoresetMode.NEXT_STEP))
    action = np.zeros(1, dtype=np.int64)
    returned: list[Tensor] = []
    obs, _ = env.reset()
    while not rollout.is_full:
        step = env.step(action)
        rollout.add_step(obs, action, step, value=true_value(torch.as_tensor(obs)))
        obs, ended = step[0], step[2] | step[3]
        returned.append(torch.as_tensor(obs))
        if mode is AutoresetMode.DISABLED and ended.any():
            obs, _ = env.reset(options={"reset_mask": ended})
    env.close()
    final_value = true_value(rollout.final_obs)
    rollout.compute_advantage(
        true_value(torch.as_tensor(obs)), last_obs=obs, final_value=final_value, gamma=GAMMA, lam=LAM
    )
    data = rollout.data[:, 0]
    return Timeline(
        mode,
        data["obs"].squeeze(-1),
        torch.cat(returned).squeeze(-1),
        _next_obs(rollout),
        data["reward"],
        data["truncated"],
        data["value"],
        data["mask"],
        data["advantage"],
        data["return"],
        _naive(mode, data, torch.cat(returned)),
    )


def _next_obs(rollout: RolloutBuffer) -> Tensor:
    """Return the state after each step: the next row, or the final observation of a truncated step."""
    next_obs = rollout.env_major()["obs"][0, 1:, 0].clone()
    if len(rollout.final_obs):
        next_obs[rollout["truncated"][:, 0]] = rollout.final_obs.squeeze(-1)
    return next_obs


def _naive(mode: AutoresetMode, data: TensorDict, returned: Tensor) -> Tensor:
    """Return the advantage [T] of a naive loop, which counts every row as a transition."""
    # Two usual mistakes: a truncation counts as an end, and the observation of step counts as the next observation.
    bootstraps = torch.ones_like(data["mask"]) if mode is AutoresetMode.SAME_STEP else ~data["truncated"]
    next_value, naive, tail = true_value(returned), torch.zeros_like(data["value"]), torch.zeros(())
    for t in reversed(range(len(naive))):
        delta = data["reward"][t] + GAMMA * bootstraps[t] * next_value[t] - data["value"][t]
        tail = delta + GAMMA * LAM * (~data["truncated"][t]) * tail
        naive[t] = tail
    return naive


def play_all() -> list[Timeline]:
    """Return the same walk under every autoreset mode."""
    return [play(mode) for mode in HEADINGS]


def render(timelines: list[Timeline]) -> RenderableType:
    """Return the timelines of all modes and the conclusion."""
    parts: list[RenderableType] = [_line({name: name for name in COLUMNS}, dict.fromkeys(COLUMNS, "bold"))]
    for timeline in timelines:
        does, mistake = HEADINGS[timeline.mode]
        heading = Text.assemble((timeline.mode.name, "bold cyan"), f"  {does}")
        naive = Text(f"naive: {mistake}", "red")
        heading.pad_right(max(1, sum(COLUMNS.values()) - len(heading) - len(naive)))
        parts += [Text(), heading.append_text(naive), *(_row(timeline, t) for t in range(len(timeline.obs)))]
    return Group(*parts, Text(), conclusion(timelines))


def _row(timeline: Timeline, t: int) -> RenderableType:
    real, cut = bool(timeline.mask[t]), bool(timeline.truncated[t])
    wrong = float(timeline.naive[t]) != (float(timeline.advantage[t]) if real else None)
    cells = {
        "t": str(int(timeline.mask[:t].sum())) if real else "",
        "obs": _short(timeline.obs[t]),
        "reward": _short(timeline.reward[t]),
        "step() gave": _short(timeline.returned[t]),
        "next obs": _short(timeline.next_obs[t]) if real else "-",
        "flags": "truncated" if cut else "" if real else "(reset)",
        "mask": str(real),
        "advantage": _fixed(timeline.advantage[t]) if real else "-",
        "return": _fixed(timeline.return_[t]) if real else "-",
        "naive advantage": _fixed(timeline.naive[t]),
        "": "✗" if wrong else "",
    }
    row_style = "dim" if not real else "yellow" if cut else ""
    styles = dict.fromkeys(COLUMNS, row_style)
    if real:
        styles["advantage"] = styles["return"] = "green"
    if timeline.returned[t] != timeline.next_obs[t] or not real:
        styles["step() gave"] = "red"
    styles["naive advantage"] = styles[""] = "red" if wrong else ""
    return _line(cells, styles)


def _line(cells: dict[str, str], styles: dict[str, str]) -> Table:
    """Return one line of the timeline."""
    table = Table.grid()
    for width in COLUMNS.values():
        table.add_column(width=width, justify="right", vertical="bottom")
    table.add_row(*(Text(cells[name], styles[name]) for name in COLUMNS))
    return table


def conclusion(timelines: list[Timeline]) -> Text:
    """Return a sentence with the computed numbers."""
    first = timelines[0]
    cut, reset = first.cut, first.cut + 1
    state, final = first.obs[cut], first.next_obs[cut]
    value, final_value = first.value[cut], true_value(final.unsqueeze(0))
    right = float(first.advantage[cut])
    same = all(torch.equal(timeline.advantage[timeline.mask], first.advantage[first.mask]) for timeline in timelines)
    arithmetic = (
        f"{_short(first.reward[cut])} + {GAMMA:g} * V({_short(final)}) - V({_short(state)}) = "
        f"{_short(first.reward[cut])} + {GAMMA:g} * {_short(final_value)} - {_short(value)} = {_short(right)}"
    )
    wrong = " and ".join(sorted({_short(timeline.naive[timeline.cut]) for timeline in timelines}))
    return Text.assemble(
        f"The clock, not the walk, ended the episode in state {_short(final)}. The critic here is exact, ",
        "so the advantage is ",
        (arithmetic, "green"),
        f", and relive computes {'the same' if same else 'something else'} in all modes; the naive loops compute ",
        (wrong, "red"),
        ", blame the steps before it too, and one learns ",
        (_short(first.naive[reset]), "red"),
        " from a step that never happened.",
    )


def _short(number: Tensor | float) -> str:
    return f"{float(number):g}"


def _fixed(number: Tensor | float) -> str:
    return f"{float(number):.2f}"
