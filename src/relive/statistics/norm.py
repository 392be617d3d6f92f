"""Numbers on one scale: the running mean and deviation of everything that was seen."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from relive.checkpoint.snapshot import SnapshotReader, State
from relive.checkpoint.state_dict import packed, unpacked
from relive.errors import SchemaError, explain
from relive.estimators.arguments import above_zero
from relive.fields.conversion import as_tensor, convert, device_of, restored_snapshot
from relive.fields.invariants import require, require_all, require_form
from relive.fields.schema import DTYPES, FLAG, Field, Path
from relive.storage.allocator import require_memory

_MOST_ROWS = 2.0**53
"""Up to here float64 counts exactly."""


class _Fit(NamedTuple):
    """What a state means for values of one dtype."""

    state: dict[str, torch.Tensor]
    mean: torch.Tensor
    rest: torch.Tensor
    """What the mean loses in that dtype: at 1e8, up to 4 in float32."""
    scale: torch.Tensor


class RunningNorm:
    """The mean and deviation of every row [shape] it was told of, and values normalised by them.

        normalize(x) = (x − mean) / √(var + eps), clipped to [−clip, clip]

    with the variance of the population; before the first row it is the identity. One norm is one leaf: a dict
    observation has a norm for each of its entries. Rows are merged as whole groups (Chan et al., Updating formulae
    and a pairwise algorithm for computing sample variances, 1979) in float64.

    Args:
        shape: shape of one row.
        eps: added to the variance, so that a constant is not divided by 0.
        clip: bound of normalised values; None does not clip.
        device: where the moments are kept.

    >>> norm = RunningNorm(2)
    >>> norm.update([[1.0, 10.0], [3.0, 30.0]])
    >>> norm(torch.tensor([3.0, 10.0]))
    tensor([ 1., -1.])
    """

    def __init__(
        self,
        shape: int | Sequence[int] = (),
        *,
        eps: float = 1e-8,
        clip: float | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shape = Field(shape).shape
        self.eps = above_zero("eps", eps)
        self.clip = None if clip is None else above_zero("clip", clip)
        device = device_of(device)
        require_memory(16 * math.prod(self.shape), "RunningNorm", "Pass the shape of one row.")
        # Replaced as a whole by every update: a reader in another thread never sees half of one.
        self._state = {
            "count": torch.zeros((), dtype=torch.float64, device=device),
            "mean": torch.zeros(self.shape, dtype=torch.float64, device=device),
            "squares": torch.zeros(self.shape, dtype=torch.float64, device=device),
        }
        """How many rows, their mean, and the sum of their squared distances from it."""
        self._fitted: _Fit | None = None
        self._lock = threading.Lock()
        """Whoever makes the next state of this one holds it: of two updates at once none is lost."""

    def __repr__(self) -> str:
        return f"RunningNorm(shape={self.shape}, eps={self.eps:g}, clip={self.clip}; {self.count} rows)"

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_lock", "_fitted", "_state")
        kept = {name: value for name, value in vars(self).items() if name not in left_out}
        return kept | {"_device": str(self.device), "_packed": packed(self._state)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        device, arrays = state.pop("_device"), unpacked(state.pop("_packed"))
        there = {name: tensor.to(device) for name, tensor in arrays.items()}
        vars(self).update(state, _state=there, _fitted=None, _lock=threading.Lock())

    # Counting

    def update(self, x: Any, mask: Any = None) -> None:
        """Take in the rows of `x` […, *shape], over all leading axes; those where `mask` […] is False are ignored."""
        self._plan(x, mask)()

    def _plan(self, x: Any, mask: Any = None) -> PlannedRows:
        """Rows that are taken in when the plan is called; see `update`."""
        x, lead = self._checked(x)
        x = x.detach()
        kept = None if mask is None else convert("mask", FLAG, mask, lead, self.device)
        # A copy of our own, worked on in place: at thousands of rows the time goes into fresh memory.
        rows = x.to(torch.float64, copy=True).reshape(-1, *self.shape)
        count = rows.new_full((), len(rows)) if kept is None else kept.sum(dtype=torch.float64)
        ignored = None if kept is None else ~kept.reshape(-1, *(1,) * len(self.shape))
        if ignored is not None:
            rows.masked_fill_(ignored, 0.0)
        mean = rows.sum(0) / count.clamp(min=1)
        rows.sub_(mean)
        if ignored is not None:
            rows.masked_fill_(ignored, 0.0)
        return PlannedRows(self, (count, mean, rows.square_().sum(0)))

    def merge(self, other: RunningNorm) -> None:
        """Take in everything that `other` was told, as if it had been told here."""
        shape = other.shape if isinstance(other, RunningNorm) else type(other).__name__
        if shape != self.shape:
            raise SchemaError(explain("merge", f"a norm of shape {self.shape}", shape, "Merge norms of equal shape."))
        PlannedRows(self, tuple(tensor.to(self.device) for tensor in other._state.values()))()

    def clear(self) -> None:
        """Forget every row."""
        with self._lock:
            self._state = {name: torch.zeros_like(tensor) for name, tensor in self._state.items()}

    # Using

    def __call__(self, x: Any) -> torch.Tensor:
        """`normalize(x)`."""
        return self.normalize(x)

    def normalize(self, x: Any) -> torch.Tensor:
        """`x` […, *shape] centred and divided by the deviation, in the dtype of `x`; a gradient flows through."""
        x, fit, dtype = self._ready(x)
        return self._clipped((x - fit.mean).sub_(fit.rest).div_(fit.scale)).to(dtype)

    def scale(self, x: Any) -> torch.Tensor:
        """`x` divided by the deviation but not centred: for rewards and returns, whose sign means something."""
        x, fit, dtype = self._ready(x)
        return self._clipped(x / fit.scale).to(dtype)

    def denormalize(self, x: Any) -> torch.Tensor:
        """What `normalize` made `x` of, unless it was clipped."""
        x, fit, dtype = self._ready(x)
        return (x * fit.scale).add_(fit.rest).add_(fit.mean).to(dtype)

    def _ready(self, x: Any) -> tuple[torch.Tensor, _Fit, torch.dtype]:
        x, _ = self._checked(x)
        dtype = x.dtype if x.is_floating_point() else torch.float32
        # float64: an integer may have more digits than float32 keeps.
        work = torch.promote_types(dtype, torch.float32) if x.is_floating_point() else torch.float64
        return x.to(work), self._fit(work), dtype

    def _fit(self, dtype: torch.dtype) -> _Fit:
        """What is subtracted and divided by, worked out once for many batches between two updates."""
        state, known = self._state, self._fitted
        if known is None or known.state is not state or known.mean.dtype is not dtype:
            with torch.inference_mode(False):  # who trains next may need what was worked out while acting
                mean = state["mean"].to(dtype)
                scale = torch.where(state["count"] > 0, (self._var(state) + self.eps).sqrt(), 1.0)
                self._fitted = known = _Fit(state, mean, (state["mean"] - mean).to(dtype), scale.to(dtype))
        return known

    def _clipped(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.clip is None else x.clamp(-self.clip, self.clip)

    def _checked(self, x: Any) -> tuple[torch.Tensor, tuple[int, ...]]:
        """`x` as a tensor of real numbers on the device, with its gradient, and its leading axes."""
        plain = isinstance(x, torch.Tensor) and x.layout == torch.strided and x.dtype in DTYPES
        here = plain and x.device == self.device
        tensor = x if here else as_tensor("x", x, self.device).to(self.device)
        lead = tensor.ndim - len(self.shape)
        if lead < 0 or tuple(tensor.shape[lead:]) != self.shape or tensor.is_complex():
            shape = ", ".join(["…", *map(str, self.shape)])
            got = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            raise SchemaError(explain("x", f"real numbers of shape ({shape})", got, "Pass rows of the norm's shape."))
        return tensor, tuple(tensor.shape[:lead])

    # Reading

    @property
    def count(self) -> int:
        """How many rows it was told of."""
        return int(self._state["count"])

    @property
    def mean(self) -> torch.Tensor:
        """float64 [shape]; 0 before the first row."""
        return self._state["mean"].clone()

    @property
    def var(self) -> torch.Tensor:
        """Of the population, float64 [shape]; 1 before the first row."""
        return self._var(self._state)

    @staticmethod
    def _var(state: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.where(state["count"] > 0, state["squares"] / state["count"].clamp(min=1), 1.0)

    @property
    def std(self) -> torch.Tensor:
        """The root of `var`."""
        return self.var.sqrt()

    def check(self) -> None:
        """Verify that the moments are consistent with the row count; NaN inputs give NaN."""
        for name, tensor in self._state.items():
            require_form(f"norm: {name}", tensor, () if name == "count" else self.shape, torch.float64, self.device)
        if self.device.type == "meta":  # which has no values to look at
            return
        count, mean, squares = self._state.values()
        rows = float(count)
        right = 0 <= rows < _MOST_ROWS and rows.is_integer()
        require(right, "norm: count", "a whole number of rows", rows)
        require_all(~(squares < 0), "norm: squares", "numbers of at least 0", squares)
        for name, moment in (("mean", mean), ("squares", squares)):
            require_all((moment == 0) | (count > 0), f"norm: {name}", "0 before the first row", moment)

    # Moving and saving

    @property
    def device(self) -> torch.device:
        """Where it is, and where tensors must be."""
        return self._state["mean"].device

    def to(self, device: torch.device | str) -> RunningNorm:
        """Move to another device; returns itself."""
        there = device_of(device)
        with self._lock:
            self._state = {name: tensor.to(there) for name, tensor in self._state.items()}
        return self

    def config(self) -> list[Any]:
        """How an equal norm that has seen no row is made, as JSON."""
        return [list(self.shape), self.eps, self.clip]

    def state(self) -> State:
        """Everything that rows change, as tensors of its own."""
        return State({}, self.snapshot())

    def load_state(self, saved: SnapshotReader) -> None:
        """Continue from a saved state of a norm of the same shape."""
        with self._lock:
            self._state = saved.arrays_like(self._state)

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Everything that rows change, as tensors of its own."""
        return {name: tensor.clone() for name, tensor in self._state.items()}

    def restore(self, snapshot: Mapping[str, torch.Tensor]) -> None:
        """Go back to a snapshot, of this norm or of another of the same shape."""
        with self._lock:
            self._state = restored_snapshot("RunningNorm", snapshot, self._state)


def plan_rows(norm: RunningNorm, x: Any, mask: Any) -> PlannedRows:
    """Rows that a norm takes in when the plan is called; see `RunningNorm.update`."""
    return norm._plan(x, mask)


class PlannedRows:
    """Rows that a norm takes in once, however often this is called: a signal may interrupt it."""

    def __init__(self, norm: RunningNorm, moments: tuple[torch.Tensor, ...]) -> None:
        self._norm, self._moments = norm, moments
        self._before = norm._state
        self._after = self._merged()
        self._is_done = False

    def __call__(self) -> None:
        with self._norm._lock:
            if self._is_done:
                return
            if self._norm._state is not self._before:  # somebody else has changed it since
                self._before = self._norm._state
                self._after = self._merged()
            self._norm._state, self._is_done = self._after, True  # without a call: no signal comes between

    def _merged(self) -> dict[str, torch.Tensor]:
        before, (count, mean, squares) = self._before, self._moments
        total = before["count"] + count
        if total.device.type == "cpu" and total >= _MOST_ROWS:  # elsewhere nobody looks
            got = f"{int(before['count'])} and {int(count)} more"
            raise OverflowError(explain("update", "fewer than 2^53 rows", got, "Call clear()."))
        share = count / total.clamp(min=1)
        apart = mean - before["mean"]
        return {
            "count": total,
            "mean": before["mean"] + apart * share,
            "squares": before["squares"] + squares + apart.square() * (before["count"] * share),
        }


Norms: TypeAlias = Mapping[str, RunningNorm] | Mapping[Path, RunningNorm] | Mapping[str | Path, RunningNorm]
"""Norms by field or path; written out, because the keys of a Mapping are invariant."""
