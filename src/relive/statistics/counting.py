"""Numbers that steps change, and how they take in steps: in one native call, or as a planned change of tensors."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from relive import kernels
from relive.checkpoint.snapshot import SnapshotReader, State
from relive.checkpoint.state_dict import pack, unpack
from relive.errors import SchemaError, explain
from relive.schema.conversion import device_of, restored_snapshot

if TYPE_CHECKING:
    from relive.kernels._native import Counters

lock = threading.RLock()
"""Held by whoever reads or changes the numbers of any statistics or norm."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


class Counted:
    """Numbers in tensors that are changed in place by whoever holds `lock`: the native core knows their memory."""

    _not_pickled = ("_tensors", "_counters", "_is_held", "_owner")
    _owner: Any = staticmethod(lambda: None)
    """Returns the buffer's observers that count here; None if there are none any more."""

    def _keep(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._counters: Any = self._own_counters()
        """The native counters of `update`."""
        self._is_held = False
        """The native core counts steps of a buffer here."""

    def _own_counters(self) -> Any:
        raise NotImplementedError

    def _assign(self, tensors: Mapping[str, torch.Tensor]) -> None:
        with lock:
            kernels.complete(lambda: [tensor.copy_(tensors[name]) for name, tensor in self._tensors.items()])

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in vars(self).items() if name not in self._not_pickled}
        return kept | {"_device": str(self.device), "_packed": pack(self.snapshot())}

    @torch.inference_mode(False)
    def __setstate__(self, state: dict[str, Any]) -> None:
        device, arrays = state.pop("_device"), unpack(state.pop("_packed"))
        vars(self).update(state)
        self._keep({name: tensor.to(device) for name, tensor in arrays.items()})

    @property
    def device(self) -> torch.device:
        """Where the numbers are, and where tensors must be."""
        return next(iter(self._tensors.values())).device

    @torch.inference_mode(False)
    def to(self, device: torch.device | str) -> Any:
        """Move to another device, where the coming steps will be; returns itself."""
        there = torch.empty(0, device=device_of(device)).device  # "cuda" is "cuda:0"
        if there == self.device:
            return self
        if self._is_held:
            expected = f"{self.device}, where a buffer counts its steps"
            raise SchemaError(explain(type(self).__name__, expected, there, "Make another one for that device."))
        with lock:
            self._keep({name: tensor.to(there) for name, tensor in self._tensors.items()})
        return self

    def clear(self) -> None:
        """Forget everything that was counted, running episodes too."""
        self._assign({name: torch.zeros_like(tensor) for name, tensor in self._tensors.items()})

    def state(self) -> State:
        """Everything that steps change, as tensors of its own."""
        return State({}, self.snapshot())

    def load_state(self, saved: SnapshotReader) -> None:
        """Continue from a saved state of an object with the same arguments."""
        self._assign(saved.arrays_like(self._tensors))

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Everything that steps change, as tensors of its own."""
        with lock:
            return {name: tensor.clone() for name, tensor in self._tensors.items()}

    def restore(self, snapshot: Mapping[str, torch.Tensor]) -> None:
        """Go back to a snapshot, of this object or of another with the same arguments."""
        self._assign(restored_snapshot(type(self).__name__, snapshot, self._tensors))


def hold(counted: Counted) -> None:
    """The native core counts steps of a buffer here from now on: the numbers stay where they are."""
    counted._is_held = True


def claim(stats: Counted, owner: object) -> None:
    """Let statistics belong to one buffer: the steps of two would be counted into the same episodes."""
    if stats._owner() is not None:
        gc.collect()  # a buffer that nobody has any more may wait for it
    if stats._owner() is not None:
        remedy = "Give each buffer an EpisodeStats of its own, or call its update yourself."
        expected, got = "statistics that no other buffer counts in", "an EpisodeStats that a buffer counts in"
        raise SchemaError(explain("stats", expected, got, remedy))
    stats._owner = weakref.ref(owner)


class Episodes(NamedTuple):
    """The numbers of `EpisodeStats`, and the leaves of a step that they are counted from."""

    numbers: tuple[torch.Tensor, ...]
    """Running sums, the ring of finished episodes, and the counts."""
    rewards: list[int]
    metrics: list[int]
    reasons: list[int]


class Moments(NamedTuple):
    """The numbers of a `RunningNorm`, and the leaf of a step that they are counted from."""

    numbers: tuple[torch.Tensor, ...]
    """Rows, their mean, and the sum of their squared distances from it."""
    leaf: int


def counters(
    dtypes: Sequence[torch.dtype], envs: int | None, flags: tuple[int, ...] | None, episodes: Episodes | None,
    moments: Sequence[Moments],
) -> Counters | None:  # fmt: skip
    """The native counters of steps whose leaves have these dtypes; None where torch ops must count.

    `envs` of None is any number of environments. `flags` are the leaves "terminated" and "truncated". Leaves after
    those of `dtypes` are measured: see `Counters.measure`.
    """
    native = kernels.native()
    if native is None or not all(each.numbers[0].is_cpu for each in (episodes, *moments) if each is not None):
        return None
    measured = 0 if episodes is None else len(episodes.metrics) + len(episodes.reasons)
    if len(dtypes) + measured > native.MOST_LEAVES or (torch.bfloat16 in dtypes and not native.exchange()):
        return None
    told = None if episodes is None else (*map(kernels.buffer_of, episodes.numbers), *episodes[1:])
    norms = [(*map(kernels.buffer_of, each.numbers), each.leaf) for each in moments]
    return native.Counters(lock, len(dtypes), envs or -1, flags, told, norms)
