"""Base class of episode statistics and running norms, and the native counters that update their tensors."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from relive import kernels
from relive.checkpoint.snapshot import State
from relive.checkpoint.state_dict import pack_arrays, unpack_arrays
from relive.errors import SchemaError, explain
from relive.schema.conversion import as_device
from relive.storage.codec import SnapshotReader

if TYPE_CHECKING:
    from relive.kernels._native import Counters

lock = threading.RLock()
"""Lock of all statistics and norms, held while their tensors are read or changed."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


class Accumulator:
    """Tensors that are updated in place under `lock`; the native core stores their addresses."""

    _not_pickled = ("_tensors", "_counters", "_is_bound", "_owner")
    _owner: Any = staticmethod(lambda: None)
    """Weak reference to the observers of the buffer that updates this object; refers to None without a buffer."""

    def _set_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._counters = self._make_counters()
        """Native counters for `update`; None if torch ops are used."""
        self._is_bound = False
        """Whether native counters of a buffer store the addresses of the tensors, so that `to` must refuse."""

    def _make_counters(self) -> Counters | None:
        raise NotImplementedError

    def _make_update(self, values: Any, mask: torch.Tensor | None) -> Callable[[], None]:
        raise NotImplementedError

    def _copy_from(self, tensors: Mapping[str, torch.Tensor]) -> None:
        with lock:
            kernels.complete(lambda: [tensor.copy_(tensors[name]) for name, tensor in self._tensors.items()])

    def __getstate__(self) -> dict[str, Any]:
        attributes = {name: value for name, value in vars(self).items() if name not in self._not_pickled}
        return attributes | {"_device": str(self.device), "_packed": pack_arrays(self.snapshot())}

    @torch.inference_mode(False)
    def __setstate__(self, state: dict[str, Any]) -> None:
        device, arrays = state.pop("_device"), unpack_arrays(state.pop("_packed"))
        vars(self).update(state)
        self._set_tensors({name: tensor.to(device) for name, tensor in arrays.items()})

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return next(iter(self._tensors.values())).device

    @torch.inference_mode(False)
    def to(self, device: torch.device | str) -> Any:
        """Move to another device and return this object."""
        # The device of a tensor includes its index: "cuda" becomes "cuda:0".
        target = torch.empty(0, device=as_device(device)).device
        if target == self.device:
            return self
        if self._is_bound:
            expected = f"{self.device}, where a buffer counts its steps"
            raise SchemaError(explain(type(self).__name__, expected, target, "Make another one for that device."))
        with lock:
            self._set_tensors({name: tensor.to(target) for name, tensor in self._tensors.items()})
        return self

    def clear(self) -> None:
        """Reset all counts to zero, running episodes included."""
        self._copy_from({name: torch.zeros_like(tensor) for name, tensor in self._tensors.items()})

    def state(self) -> State:
        """Return copies of all tensors."""
        return State({}, self.snapshot())

    def load_state(self, saved: SnapshotReader) -> None:
        """Continue from a saved state of an object with the same arguments."""
        tensors = self._tensors.items()
        self._copy_from({name: saved.read_like(name, like).to(like.device, copy=True) for name, like in tensors})

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Return copies of all tensors."""
        with lock:
            return {name: tensor.clone() for name, tensor in self._tensors.items()}

    def restore(self, snapshot: Mapping[str, torch.Tensor]) -> None:
        """Restore a snapshot of this object, or of an object with the same arguments."""
        expected, got = _describe_tensors(self._tensors), _describe_tensors(snapshot)
        if got != expected:
            remedy = "Construct it with the arguments that the saved object had."
            raise SchemaError(explain(type(self).__name__, f"a snapshot of {expected}", got, remedy))
        self._copy_from({name: snapshot[name].to(tensor.device) for name, tensor in self._tensors.items()})


def _describe_tensors(tensors: Any) -> str | dict[str, Any]:
    """Return the shapes and dtypes of the tensors in a dict, and the type names of other values."""
    if not isinstance(tensors, Mapping):
        return type(tensors).__name__
    return {
        name: (tuple(tensor.shape), tensor.dtype) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        for name, tensor in tensors.items()
    }


def claim_for_buffer(stats: Accumulator, owner: object) -> None:
    """Set the buffer that updates `stats`; raise if another buffer does, which would mix the steps of both."""
    if stats._owner() is not None:
        # Garbage is collected first, because the owner may be a deleted buffer that still exists.
        gc.collect()
    if stats._owner() is not None:
        remedy = "Give each buffer an EpisodeStats of its own, or call its update yourself."
        expected, got = "statistics that no other buffer counts in", "an EpisodeStats that a buffer counts in"
        raise SchemaError(explain("stats", expected, got, remedy))
    stats._owner = weakref.ref(owner)


def make_counters(
    dtypes: Sequence[torch.dtype], envs: int | None, flag_leaves: tuple[int, ...] | None,
    episodes: tuple[Accumulator, Sequence[int], Sequence[int], Sequence[int]] | None,
    norms: Sequence[tuple[Accumulator, int]],
) -> Counters | None:  # fmt: skip
    """Return native counters of steps whose leaves have these dtypes; None if only torch ops can count.

    Args:
        dtypes: dtypes of the leaves of a step. Leaves with higher numbers are passed to `Counters.measure`.
        envs: number of environments; None accepts any number.
        flag_leaves: leaf numbers of "terminated" and "truncated".
        episodes: the episode statistics, and the leaf numbers of rewards, metrics and reasons.
        norms: pairs of a norm and its leaf number.
    """
    native = kernels.native_core()
    accumulators = [*([] if episodes is None else [episodes[0]]), *(norm for norm, _ in norms)]
    if native is None or not all(accumulator.device.type == "cpu" for accumulator in accumulators):
        return None
    num_leaves = len(dtypes) + (0 if episodes is None else len(episodes[2]) + len(episodes[3]))
    if num_leaves > native.MAX_LEAVES:
        return None
    arrays = [tuple(accumulator._tensors.values()) for accumulator in accumulators]
    episode_arguments = None if episodes is None else (*arrays.pop(0), *map(list, episodes[1:]))
    norm_arguments = [(*numbers, leaf) for numbers, (_, leaf) in zip(arrays, norms, strict=True)]
    return native.Counters(lock, len(dtypes), envs or -1, flag_leaves, episode_arguments, norm_arguments)
