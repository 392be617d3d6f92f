"""Normalised advantages, and the share of the returns' variance that a critic explains."""

from __future__ import annotations

import torch
from torch import Tensor

from relive.estimators.arguments import align
from relive.schema.checks import number


def normalize(x: Tensor, mask: Tensor | None = None, *, eps: float = 1e-8, correction: int = 1) -> Tensor:
    """`x` with mean 0 and standard deviation 1 over all its entries, in its shape [T, N, …].

        (x − mean) / (std + eps)

    with the deviation of `torch.std`. A single entry becomes 0.

    Args:
        x: [T, N, …], or any other shape.
        mask: bool, like x or its leading axes [T, N]; entries where it is False do not count and become 0.
        eps: added to the deviation, so that equal entries become 0.
        correction: 1 gives the unbiased deviation, 0 the deviation of the population.
    """
    eps = number("eps", eps)
    (x,), _, mask = align({"x": x}, {}, mask)
    centered, counted = _center(x, mask)
    return centered / ((centered.square().sum() / (counted - correction).clamp(min=1)).sqrt() + eps)


def explained_variance(value: Tensor, return_: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """The share of the returns' variance that the values explain []: 1 at best, NaN for constant returns.

        1 − Var(return − value) / Var(return)

    A constant value gives 0.

    Args:
        value: [T, N, …]; the critic's predictions.
        return_: like value; the returns that it should have predicted.
        mask: bool, like value or its leading axes [T, N]; entries where it is False do not count.
    """
    (value, return_), _, mask = align({"value": value, "return_": return_}, {}, mask)
    unexplained, total = (_center(x, mask)[0].square().sum() for x in (return_ - value, return_))
    return torch.where(total == 0, torch.nan, 1 - unexplained / total)


def _center(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """x minus its mean over the counted entries (0 elsewhere), and the number of counted entries.

    The largest entry is subtracted first: equal entries then become exactly 0, whatever their sum rounds to.
    """
    if mask is None:
        mask = torch.ones_like(x, dtype=torch.bool)
    ignored = mask.logical_not()
    counted = mask.sum()
    if x.numel() == 0:
        return x, counted
    shifted = (x - x.masked_fill(ignored, -torch.inf).max()).masked_fill(ignored, 0)
    return (shifted - shifted.sum() / counted.clamp(min=1)).masked_fill(ignored, 0), counted
