"""The base class of samplers, and the verification of users' samplers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import FrozenInstanceError
from typing import Any, TypeVar

import torch

from relive.errors import SchemaError, explain
from relive.replay.backend import Backend
from relive.rng import Randomness
from relive.schema.assembly import copy_tensor_pairs

Self = TypeVar("Self", bound="Sampler")
Choice = tuple[torch.Tensor, torch.Tensor | None]
"""Flat slots of transitions, int64 [B], and importance weights, float32 [B], or None."""


class Sampler:
    """Chooses the rows of batches. Subclasses need only `sample`.

    A buffer binds the sampler that it receives: `bind` returns a copy with the buffer's rows (`storage`) and random
    numbers (`rng`). The fields of a sampler that is a dataclass cannot be changed.
    """

    independent: bool = True
    """Whether the buffer may discard a batch of this sampler and draw another. False for epochs and queues."""
    returns_weights: bool = False
    """Whether `sample` returns importance weights."""
    may_return_fewer: bool = False
    """Whether a batch may have fewer rows than requested, such as the last one of an epoch."""

    storage: Backend
    rng: Randomness
    is_ours: bool = False
    """Whether the class belongs to this package; its results need no verification."""

    def bind(self: Self, storage: Backend, rng: Randomness) -> Self:
        """Return a copy that chooses rows of this storage with these random numbers."""
        bound = copy.copy(self)
        bound.storage, bound.rng = storage, rng
        bound.is_ours = type(self).__module__.partition(".")[0] == __name__.partition(".")[0]
        bound.on_bind()
        return bound

    def on_bind(self) -> None:
        """Prepare the bound copy, for example by `self.storage.allocate`; called once per buffer."""

    def sample(self, count: int) -> Choice:
        """Choose `count` rows. At least one row is stored when this is called."""
        raise NotImplementedError(f"{type(self).__name__}.sample: expected a method that chooses rows.")

    def on_write(self, slots: torch.Tensor) -> None:
        """Update the state after a write to these slots, whose transitions were replaced or removed.

        After a signal this method may be called twice for the same write: assign values, do not add to them.
        """

    def on_clear(self) -> None:
        """Reset the state after `clear`."""

    def on_recover(self) -> None:
        """Repair the state after rows changed without `on_write`: after a crash of another process, or a load."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state to save, without the random generator. The tensors may share memory with the sampler."""
        return {}

    def load_state(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Restore a saved state; the rows are already loaded. Raises a ValueError if the state is invalid."""

    def check(self) -> None:
        """Verify the sampler's state; raises an InvariantError."""

    keeps_state_in_memory = False
    """Whether the state is allocated with the rows, so that reopened memory already holds it."""
    updates_by_id = False
    """Whether `update` takes row ids instead of slots."""

    optional_state: frozenset[str] = frozenset()
    """Names that a saved state may lack; their values are then zero."""

    def owned_arrays(self) -> Iterable[torch.Tensor]:
        """Return the arrays that this sampler writes to, which `out` must not overlap; none for a user's class."""
        return self.state().values() if self.is_ours else ()

    @property
    def takes_priorities(self) -> bool:
        """Whether `update_priority` of the buffer works with this sampler."""
        return hasattr(self, "update")

    @property
    def follows_writes(self) -> bool:
        """Whether the buffer calls `after_write` after every write."""
        cls = type(self)
        return cls.on_write is not Sampler.on_write or cls.after_write is not Sampler.after_write

    def after_write(self) -> None:
        """Call `on_write` with the slots that the last write changed."""
        slots, changed = self.storage.changed_slots()
        self.on_write(slots if changed is None else slots[changed])

    def choose(self, count: int) -> Choice:
        """Call `sample`, and verify the result of a user's class."""
        chosen = self.sample(count)
        return chosen if self.is_ours else verify_choice(self, chosen, count)

    def sample_into(self, count: int, weight: torch.Tensor) -> torch.Tensor:
        """Choose `count` rows and write their weights to `weight`."""
        slots, weights = self.choose(count)
        if weights is not None:
            copy_tensor_pairs([(weight[: len(slots)], weights)])
        return slots

    def require_rows(self, count: int) -> None:
        """Raise a NotReadyError if `sample(count)` would raise one; a Mixture checks all buffers before one draws."""

    def rescale_priorities(self, alpha: float, eps: float) -> None:
        """Convert loaded priorities, which were saved with `alpha` and `eps`, to this sampler's settings."""

    def find_input_faults(self) -> Iterable[str]:
        """Return messages about inputs that a device skipped and counted; `check` raises them, `save` warns of them."""
        return ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __setattr__(self, name: str, value: Any) -> None:
        if name in getattr(self, "__dataclass_fields__", ()) and name in self.__dict__:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super().__setattr__(name, value)


def require_sampler(sampler: Any) -> Sampler:
    """Return `sampler`; raises if it is not a Sampler."""
    if isinstance(sampler, type):
        name = sampler.__name__
        raise SchemaError(explain("sampler", f"{name}(…)", f"the class {name}", f"Pass an instance: {name}(…)."))
    if isinstance(sampler, Sampler):
        return sampler
    remedy = "Pass a sampler of relive, or derive yours from rl.Sampler and give it a method sample."
    if hasattr(sampler, "start"):
        remedy = (
            "Derive it from rl.Sampler: `bind(storage, rng)` replaces `start`, and `sample(count)`, which returns "
            "(slots, weight), replaces `draw`."
        )
    raise SchemaError(explain("sampler", "an rl.Sampler", repr(sampler), remedy))


def verify_choice(sampler: Sampler, chosen: Any, count: int) -> Choice:
    """Verify the result of a user's sampler: `count` slots of transitions, and weights if it returns any.

    The values of slots are verified only on the CPU; on other devices that would synchronise.
    """
    where, device = f"{type(sampler).__name__}.sample", sampler.storage.device
    if not isinstance(chosen, tuple) or len(chosen) != 2:
        raise SchemaError(
            explain(where, "(slots, weight)", _summarize(chosen), "Return (slots, None) without weights.")
        )
    slots, weight = chosen
    or_fewer = " or fewer" if sampler.may_return_fewer else ""
    is_index = isinstance(slots, torch.Tensor) and slots.dtype == torch.int64 and slots.ndim == 1
    num_missing = count - len(slots) if is_index and slots.device == device else -1
    if num_missing and not (sampler.may_return_fewer and 0 < num_missing < count):
        expected = f"int64 slots of shape ({count},){or_fewer} on {device}"
        raise SchemaError(explain(where, expected, _summarize(slots), "Return one slot for each row of the batch."))
    if (weight is not None) != sampler.returns_weights:
        got, remedy = ("weights", "True") if weight is not None else ("None", "False")
        expected = f"weights exactly if returns_weights, which is {sampler.returns_weights}"
        raise SchemaError(explain(where, expected, got, f"Set returns_weights = {remedy} in the class."))
    is_weight = isinstance(weight, torch.Tensor) and weight.dtype == torch.float32 and weight.shape == slots.shape
    if weight is not None and (not is_weight or weight.device != device):
        expected = f"float32 weights of shape ({len(slots)},) on {device}"
        raise SchemaError(explain(where, expected, _summarize(weight), "Return one weight for each slot."))
    if device.type == "cpu":
        is_empty = ~sampler.storage.ring.is_drawable(slots)
        if is_empty.any():
            got, remedy = f"slot {int(slots[is_empty][0])}", "Choose among storage.stored(), or with storage.draw."
            raise SchemaError(explain(where, "slots of stored transitions", got, remedy))
    # The result is a new tensor object, because the backend recognises the tensor of its own last draw by identity.
    return slots.contiguous()[:], weight


def _summarize(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)} on {value.device}"
    return repr(value)[:80]
