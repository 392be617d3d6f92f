"""The sequences that AgileRL prepares once a rollout and then draws minibatches of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from tensordict import TensorDict

from relive.compat.agilerl.original import original_or


class BPTTSequenceType(Enum):
    """How episodes are cut into sequences of `max_seq_len` steps; what is left over at an episode's end is dropped."""

    CHUNKED = "chunked"
    """One after another."""
    MAXIMUM = "maximum"
    """From every step."""
    FIFTY_PERCENT_OVERLAP = "fifty_percent_overlap"
    """Each starts half a sequence after the one before."""
    FIFTY_PERCENT_OVERLAPPING = "fifty_percent_overlap"
    """The same, as the documentation spells it."""


# One enumeration: AgileRL's own where it is installed, with the name that its documentation has for the third kind.
_only: Any = original_or("typing", BPTTSequenceType)
if not hasattr(_only, "FIFTY_PERCENT_OVERLAPPING"):
    _only.FIFTY_PERCENT_OVERLAPPING = _only.FIFTY_PERCENT_OVERLAP
BPTTSequenceType = _only

_MODES = {"chunked": "chunked", "maximum": "every", "fifty_percent_overlap": "overlap"}


def mode_of(sequence_type: Any) -> Any:
    """The core's name of a sequence type, or of its value."""
    mode = _MODES.get(getattr(sequence_type, "value", sequence_type))
    if mode is None:
        known = ", ".join(kind.name for kind in BPTTSequenceType)
        raise NotImplementedError(f"unrecognized sequence type {sequence_type!r}: pass one of {known}.")
    return mode


@dataclass(frozen=True)
class Prepared:
    """All sequences of a rollout."""

    padded: TensorDict
    """[S, L]: what the policy reads, and the hidden states that sequences start with."""
    steps: torch.Tensor
    """[S, L]: the flat steps t·N + n of the sequences."""
    mask: torch.Tensor
    """[S, L]: which of them are real, on the host as `steps` are."""

    @staticmethod
    def of(batch: TensorDict, num_envs: int, names: dict[str, str], device: Any) -> Prepared:
        """From a batch `[S]` of the core's sequences; `names` says what AgileRL calls its fields."""
        longest = int(batch["mask"].sum(1).max())
        shape = torch.Size((len(batch), longest))
        fields = {theirs: _steps(batch[ours], longest) for theirs, ours in names.items()}
        padded = TensorDict(fields, batch_size=shape).to(device)
        # [S, layers, H] has no time axis: AgileRL keeps it beside the tensors.
        padded.set_non_tensor("initial_hidden_states", batch["hidden_states"].to(device).to_dict())
        steps = batch["index"].unsqueeze(1) + num_envs * torch.arange(longest, device=batch["index"].device)
        return Prepared(padded, steps.cpu(), batch["mask"][:, :longest].cpu())

    def slices(self) -> list[torch.Tensor]:
        """The flat steps of each sequence."""
        return list(self.steps[self.mask].split(self.mask.sum(1).tolist()))

    def minibatch(self, which: torch.Tensor, unpadded: TensorDict) -> tuple[TensorDict, TensorDict]:
        """The sequences `which` `[B]`: padded `[B · L]`, and of the real steps alone what the loss needs."""
        place = which.to(self.padded.device or "cpu")
        padded = self.padded[place].reshape(-1)
        hidden = self.padded.get_non_tensor("initial_hidden_states")
        padded.set_non_tensor("initial_hidden_states", {key: state[place] for key, state in hidden.items()})
        steps = self.steps[which][self.mask[which]]
        return padded, unpadded[steps.to(unpadded.device or "cpu")]


def _steps(column: Any, longest: int) -> Any:
    """The first `longest` steps of a leaf [S, L, …], or of all leaves of a nested field [S]."""
    if isinstance(column, torch.Tensor):
        return column[:, :longest].contiguous()
    return {key: _steps(leaf, longest) for key, leaf in column.items()}
