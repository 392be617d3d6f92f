"""Small constant tensors, cached per device: creating them would be a launch in every call."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache(maxsize=256)
@torch.inference_mode(False)  # cached tensors are also used outside inference mode
def count_from(start: int, stop: int, step: int, device: torch.device) -> torch.Tensor:
    """`torch.arange(start, stop, step)`, int64 [L]."""
    return torch.arange(start, stop, step, device=device)


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def powers(gamma: float, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """γ^0 to γ^(count−1) as float64 [count], and γ^count down to γ^0 as float32 [count + 1]."""
    factors = [1.0]
    for _ in range(count):
        factors.append(factors[-1] * gamma)
    ascending = torch.tensor(factors[:-1], dtype=torch.float64, device=device)
    return ascending, torch.tensor(factors[::-1], dtype=torch.float64, device=device).float()


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def ends_of_run(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets [3, 1] of first step, final state and last step of a run of `count` steps, and their corrections [3, 1].

    The corrections are added once per step that is missing at the end of the run.
    """
    offsets = torch.tensor([[0], [count], [count - 1]], device=device)
    return offsets, torch.tensor([[0], [-1], [-1]], device=device)
