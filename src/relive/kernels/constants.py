"""Small tensors that never change, made once per device: making them again would be a launch in every call."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache(maxsize=256)
@torch.inference_mode(False)  # they are used later, in whatever mode
def count_from(start: int, stop: int, step: int, device: torch.device) -> torch.Tensor:
    """int64 [L]: start, start + step, … before `stop`."""
    return torch.arange(start, stop, step, device=device)


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def powers(gamma: float, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """γ^0 to γ^(count−1) as float64 [count], and γ^count down to γ^0 as float32 [count + 1]."""
    found = [1.0]
    for _ in range(count):
        found.append(found[-1] * gamma)
    factors = torch.tensor(found[:-1], dtype=torch.float64, device=device)
    return factors, torch.tensor(found[::-1], dtype=torch.float64, device=device).float()


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def ends_of_run(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets [3, 1] of the first step, the state after a run of `count` steps and its last step, and their changes.

    The changes [3, 1] are added for every step that is missing at the end.
    """
    places = torch.tensor([[0], [count], [count - 1]], device=device)
    return places, torch.tensor([[0], [-1], [-1]], device=device)
