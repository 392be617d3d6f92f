"""One priority for the errors of a sequence's steps."""

from __future__ import annotations

import torch

from relive.errors import SchemaError, explain
from relive.fields.schema import require_share


def sequence_priority(error: torch.Tensor, mask: torch.Tensor, *, eta: float = 0.9) -> torch.Tensor:
    """priority = η · max |δ| + (1 − η) · mean |δ| over the steps of a sequence that `mask` selects.

    (Kapturowski et al., Recurrent Experience Replay in Distributed Reinforcement Learning, 2019.) A sequence without
    such a step has the priority 0.

    Args:
        error: TD errors δ [B, L], of any sign.
        mask: which steps count, bool [B, L]: `batch["train"]` leaves out burn-in and padding.
        eta: η in [0, 1].

    >>> sequence_priority(torch.tensor([[1.0, -3.0, 9.0]]), torch.tensor([[True, True, False]]), eta=0.5)
    tensor([2.5000])
    """
    if error.ndim != 2 or not error.is_floating_point():
        got = f"{error.dtype} of shape {tuple(error.shape)}"
        raise SchemaError(explain("error", "floating-point errors [B, L]", got, "Pass the errors of all steps."))
    if mask.shape != error.shape or mask.dtype != torch.bool:
        got = f"{mask.dtype} of shape {tuple(mask.shape)}"
        raise SchemaError(explain("mask", f"bools of shape {tuple(error.shape)}", got, "Pass batch['train']."))
    require_share("eta", eta)
    size = error.detach().abs().masked_fill(~mask, 0.0)
    size = size if size.dtype == torch.float64 else size.float()  # sums of halves overflow
    mean = size.sum(1) / mask.sum(1).clamp(min=1)
    return eta * size.amax(1) + (1 - eta) * mean if error.shape[1] else mean
