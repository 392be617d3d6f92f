"""Hypothesis strategies: rollouts with random endings, masks, dtypes and memory layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

LAYOUTS = ("contiguous", "env-major", "strided", "expanded flags")


@dataclass
class Rollout:
    """Arguments of the estimators by name."""

    tensors: dict[str, Tensor | None]
    layout: str

    def __getattr__(self, name: str) -> Any:
        return self.tensors[name]

    def select(self, *names: str) -> list[Tensor | None]:
        return [self.tensors[name] for name in names]


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Return the same numbers in another memory layout."""
    if layout == "env-major" and tensor.ndim > 1:
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "strided":  # every second row and third column of a larger tensor
        wide = tensor.repeat_interleave(2, 0)
        wide = wide.repeat_interleave(3, 1) if tensor.ndim > 1 else wide
        return wide[::2, ::3] if tensor.ndim > 1 else wide[::2]
    return tensor.contiguous()


@st.composite
def rollouts(draw: st.DrawFn, *, most_steps: int = 12, most_envs: int = 20) -> Rollout:
    """Draw a rollout of shape [T], [T, N] or [T, N, A].

    Episodes end at random (terminated, truncated or both). An end may be followed by a masked dummy step, as under
    NEXT_STEP.
    """
    steps = draw(st.integers(1, most_steps))
    envs, agents = draw(st.integers(1, most_envs)), draw(st.integers(1, 3))
    axes = draw(st.sampled_from([(), (envs,), (min(envs, 4), agents)]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    layout = draw(st.sampled_from(LAYOUTS))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    ends = draw(st.sampled_from([0.0, 0.1, 0.5]))

    def numbers() -> Tensor:
        return torch.randn(steps, *axes, generator=generator, dtype=dtype)

    flag_axes = axes[:1] if layout == "expanded flags" else axes
    terminated, truncated = (torch.rand(steps, *flag_axes, generator=generator) < ends for _ in range(2))
    mask = _reset_rows(terminated | truncated) if draw(st.booleans()) else None
    tensors: dict[str, Tensor | None] = {
        "reward": numbers(), "value": numbers(), "next_value": numbers(), "log_ratio": numbers() / 2,
        "terminated": terminated, "truncated": truncated, "mask": mask,
    }  # fmt: skip
    return Rollout({name: None if x is None else laid_out(x, layout) for name, x in tensors.items()}, layout)


def _reset_rows(ended: Tensor) -> Tensor:
    """Return a mask that is False in the row after an end; a dummy step itself is no end."""
    mask = torch.ones_like(ended)
    for t in range(1, len(ended)):
        mask[t] = ~(ended[t - 1] & mask[t - 1])
    return mask


discounts = st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0])
