"""The base class of samplers: which rows a batch consists of."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import FrozenInstanceError
from typing import Any, TypeVar

import torch

from relive.errors import SchemaError, explain
from relive.replay.backend import Backend
from relive.rng import Randomness
from relive.schema.assembly import copy_leaves

Self = TypeVar("Self", bound="Sampler")
Chosen = tuple[torch.Tensor, torch.Tensor | None]
"""Flat slots of transitions, int64 [B], and their importance weights, float32 [B], where the sampler has any."""


class Sampler:
    """Chooses the rows of batches. Only `sample` is needed; everything else has a default.

    A sampler is made by the user and bound by a buffer: `bind` returns a copy that belongs to one buffer, with its
    rows (`storage`) and its random numbers (`rng`). The settings of a sampler that is a dataclass cannot be changed.
    """

    independent: bool = True
    """Whether a batch may be drawn again in place of one that was not used. False for epochs and queues."""
    returns_weights: bool = False
    """Whether `sample` returns importance weights."""
    may_return_fewer: bool = False
    """Whether a batch may have fewer rows than were asked for, such as the last one of an epoch."""

    storage: Backend
    rng: Randomness
    is_ours: bool = False
    """Whether the class is one of this package, whose results need no verification."""

    def bind(self: Self, storage: Backend, rng: Randomness) -> Self:
        """A copy that chooses rows of this storage with these random numbers."""
        bound = copy.copy(self)
        bound.storage, bound.rng = storage, rng
        bound.is_ours = type(self).__module__.partition(".")[0] == __name__.partition(".")[0]
        bound.on_bind()
        return bound

    def on_bind(self) -> None:
        """Called on the bound copy: the place to allocate what it keeps of every slot."""

    def sample(self, count: int) -> Chosen:
        """Choose `count` rows; the buffer has checked that there are any."""
        raise NotImplementedError(f"{type(self).__name__}.sample: expected a method that chooses rows.")

    def on_write(self, slots: torch.Tensor) -> None:
        """Called after a write with the slots that now hold another transition, or none.

        After a signal it may be called again for the same write: assign numbers, do not add to them.
        """

    def on_clear(self) -> None:
        """Called when the buffer has forgotten every row."""

    def on_recover(self) -> None:
        """Called when rows changed without `on_write`: after a crash of another process, or a load."""

    def state(self) -> dict[str, torch.Tensor]:
        """Everything that a checkpoint needs to continue, without the random numbers; may share memory."""
        return {}

    def load_state(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Continue from a saved state; the rows are there already. A ValueError says what is wrong with it."""

    def check(self) -> None:
        """Verify the sampler's own state; raises an InvariantError."""

    # For samplers of this package

    keeps_state_in_memory = False
    """Whether its state is allocated beside the rows and is found there again with them."""
    updates_by_id = False
    """Whether `update` takes ids of rows instead of slots and looks the rows up itself."""

    optional_state: frozenset[str] = frozenset()
    """Names of its state that a saved state may lack: they are then zero."""

    @property
    def takes_priorities(self) -> bool:
        """Whether `update_priority` works."""
        return hasattr(self, "update")

    @property
    def follows_writes(self) -> bool:
        """Whether it is told which slots a write has changed."""
        cls = type(self)
        return cls.on_write is not Sampler.on_write or cls.after_write is not Sampler.after_write

    def after_write(self) -> None:
        """Pass the slots that the last write has changed to `on_write`."""
        slots, changed = self.storage.changed_slots()
        self.on_write(slots if changed is None else slots[changed])

    def choose(self, count: int) -> Chosen:
        """`sample`, verified if the class is a user's."""
        chosen = self.sample(count)
        return chosen if self.is_ours else check_chosen(self, chosen, count)

    def sample_into(self, count: int, weight: torch.Tensor) -> torch.Tensor:
        """Choose `count` rows and write their weights to a tensor."""
        slots, weights = self.choose(count)
        if weights is not None:
            copy_leaves([(weight[: len(slots)], weights)])
        return slots

    def require_rows(self, count: int) -> None:
        """Raise a NotReadyError if `sample` would, before several buffers draw for one batch."""

    def rescale(self, alpha: float, eps: float) -> None:
        """Apply its own exponents to loaded priorities, which were stored with `alpha` and `eps`."""

    def faults(self) -> Iterable[str]:
        """Messages about inputs that a device has skipped and counted: `check` raises for them, and `save` warns."""
        return ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __setattr__(self, name: str, value: Any) -> None:
        if name in getattr(self, "__dataclass_fields__", ()) and name in self.__dict__:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super().__setattr__(name, value)


def require_sampler(sampler: Any) -> Sampler:
    """The sampler that was passed; raises if it is none."""
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


def check_chosen(sampler: Sampler, chosen: Any, count: int) -> Chosen:
    """The return value of a user's sampler, if it is `count` slots of transitions and their weights.

    The values of slots are verified in host memory only: elsewhere that would wait for the device.
    """
    where, device = f"{type(sampler).__name__}.sample", sampler.storage.device
    if not isinstance(chosen, tuple) or len(chosen) != 2:
        raise SchemaError(explain(where, "(slots, weight)", _brief(chosen), "Return (slots, None) without weights."))
    slots, weight = chosen
    fewer = " or fewer" if sampler.may_return_fewer else ""
    is_long = isinstance(slots, torch.Tensor) and slots.dtype == torch.int64 and slots.ndim == 1
    if not is_long or slots.device != device or not _fits(len(slots), count, sampler.may_return_fewer):
        expected = f"int64 slots of shape ({count},){fewer} on {device}"
        raise SchemaError(explain(where, expected, _brief(slots), "Return one slot for each row of the batch."))
    if (weight is not None) != sampler.returns_weights:
        got, remedy = ("weights", "True") if weight is not None else ("None", "False")
        expected = f"weights exactly if returns_weights, which is {sampler.returns_weights}"
        raise SchemaError(explain(where, expected, got, f"Set returns_weights = {remedy} in the class."))
    is_weight = isinstance(weight, torch.Tensor) and weight.dtype == torch.float32 and weight.shape == slots.shape
    if weight is not None and (not is_weight or weight.device != device):
        expected = f"float32 weights of shape ({len(slots)},) on {device}"
        raise SchemaError(explain(where, expected, _brief(weight), "Return one weight for each slot."))
    if device.type == "cpu":
        bad = ~sampler.storage.ring.is_drawable(slots)
        if bad.any():
            got, remedy = f"slot {int(slots[bad][0])}", "Choose among storage.stored(), or with storage.draw."
            raise SchemaError(explain(where, "slots of stored transitions", got, remedy))
    return slots.contiguous()[:], weight  # another object, of which no backend thinks that it is still as it was drawn


def _fits(length: int, count: int, may_be_fewer: bool) -> bool:
    return length == count or (may_be_fewer and 0 < length < count)


def _brief(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)} on {value.device}"
    return repr(value)[:80]
