"""Running mean and deviation of a field, and normalisation with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from relive.errors import SchemaError, explain, verify
from relive.schema.checks import check_above_zero
from relive.schema.conversion import as_device, as_tensor, convert
from relive.schema.fields import DTYPES, FLAG_FIELD, Field, Path
from relive.schema.invariants import verify_elements, verify_layout
from relive.statistics.counting import Accumulator, lock, make_counters
from relive.storage.allocator import require_host_memory

if TYPE_CHECKING:
    from relive.kernels._native import Counters

_MAX_ROWS = 2.0**53
"""Upper bound of the number of rows: float64 represents every smaller count exactly."""


class _RoundedMoments(NamedTuple):
    """Mean and deviation, rounded to one dtype."""

    num_rows: float | None
    """Number of rows at the time of the fit; None if every update deletes the fit."""
    mean: torch.Tensor
    rounding_error: torch.Tensor
    """Exact mean minus `mean`; at a mean of 1e8 in float32 the difference is up to 4."""
    scale: torch.Tensor


class RunningNorm(Accumulator):
    """Running mean and deviation of all rows [shape] passed to `update`, and normalisation with them.

        normalize(x) = (x − mean) / √(var + eps), clipped to [−clip, clip]

    with the variance of the population; before the first row it is the identity. Use one norm per leaf: a dict
    observation needs a norm for each entry. Batches of rows are merged in float64 (Chan et al., Updating formulae and
    a pairwise algorithm for computing sample variances, 1979).

    Args:
        shape: shape of one row.
        eps: added to the variance, to avoid division by 0.
        clip: bound of normalised values; None does not clip.
        device: device of the moments.

    >>> norm = RunningNorm(2)
    >>> norm.update([[1.0, 10.0], [3.0, 30.0]])
    >>> norm(torch.tensor([3.0, 10.0]))
    tensor([ 1., -1.])
    """

    # Tensors that are made in inference mode could not be changed outside it.
    @torch.inference_mode(False)
    def __init__(
        self, shape: int | Sequence[int] = (), *, eps: float = 1e-8, clip: float | None = None,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        self.shape = Field(shape).shape
        self.eps = check_above_zero("eps", eps)
        self.clip = None if clip is None else check_above_zero("clip", clip)
        device = as_device(device)
        require_host_memory(16 * math.prod(self.shape), "RunningNorm", "Pass the shape of one row.")
        # The moments are the number of rows, their mean, and the sum of squared distances from the mean.
        tensors = {
            "count": torch.zeros((), dtype=torch.float64, device=device),
            "mean": torch.zeros(self.shape, dtype=torch.float64, device=device),
            "squares": torch.zeros(self.shape, dtype=torch.float64, device=device),
        }
        self._cached_fit: _RoundedMoments | None = None
        self._set_tensors(tensors)

    def __repr__(self) -> str:
        return f"RunningNorm(shape={self.shape}, eps={self.eps:g}, clip={self.clip}; {self.count} rows)"

    _not_pickled = (*Accumulator._not_pickled, "_cached_fit")
    _cached_fit = None

    def _make_counters(self) -> Counters | None:
        return make_counters([torch.float64], None, None, None, [(self, 0)])

    def update(self, x: Any, mask: Any = None) -> None:
        """Count the rows of `x` […, *shape], over all leading axes; rows where `mask` […] is False are ignored."""
        rows, leading_shape = self._convert_input(x)
        is_counted = None if mask is None else convert("mask", FLAG_FIELD, mask, leading_shape, self.device)
        if self._counters is not None:
            block = as_tensor("x", rows, self.device).reshape(1, -1, *self.shape).contiguous()
            is_ignored = None if is_counted is None else ~is_counted.reshape(-1)
            self._counters.count((block,), 0, 1, None, is_ignored, None)
            return
        with lock:
            self._make_update(rows, is_counted)()

    def _make_update(self, values: torch.Tensor, mask: torch.Tensor | None) -> Callable[[], None]:
        """Return a function that counts rows with torch ops.

        The caller holds `counting.lock` until it has called the function. Repeated calls count the rows once.
        """
        # The copy is changed in place: with thousands of rows, allocating memory takes most of the time.
        rows = values.detach().to(torch.float64, copy=True).reshape(-1, *self.shape)
        count = rows.new_full((), len(rows)) if mask is None else mask.sum(dtype=torch.float64)
        is_ignored = None if mask is None else ~mask.reshape(-1, *(1,) * len(self.shape))
        if is_ignored is not None:
            rows.masked_fill_(is_ignored, 0.0)
        mean = rows.sum(0) / count.clamp(min=1)
        rows.sub_(mean)
        if is_ignored is not None:
            rows.masked_fill_(is_ignored, 0.0)
        return partial(self._copy_from, self._merge_moments(count, mean, rows.square_().sum(0)))

    def merge(self, other: RunningNorm) -> None:
        """Add all rows of `other`, as if they had been passed to `update`."""
        shape = other.shape if isinstance(other, RunningNorm) else type(other).__name__
        if shape != self.shape:
            raise SchemaError(explain("merge", f"a norm of shape {self.shape}", shape, "Merge norms of equal shape."))
        with lock:
            self._copy_from(self._merge_moments(*(tensor.to(self.device) for tensor in other.snapshot().values())))

    def _merge_moments(self, count: torch.Tensor, mean: torch.Tensor, squares: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the moments of all rows after adding rows with these moments; the caller holds the lock."""
        before = self._tensors
        total = before["count"] + count
        # Other devices are not checked, because reading the count would synchronise.
        if total.device.type == "cpu" and total >= _MAX_ROWS:
            got = f"{int(before['count'])} and {int(count)} more"
            raise OverflowError(explain("update", "fewer than 2^53 rows", got, "Call clear()."))
        share = count / total.clamp(min=1)
        difference = mean - before["mean"]
        return {
            "count": total,
            "mean": before["mean"] + difference * share,
            "squares": before["squares"] + squares + difference.square() * (before["count"] * share),
        }

    def _copy_from(self, tensors: Mapping[str, torch.Tensor]) -> None:
        with lock:
            self._cached_fit = None
            super()._copy_from(tensors)

    def __call__(self, x: Any) -> torch.Tensor:
        """Return `normalize(x)`."""
        return self.normalize(x)

    def normalize(self, x: Any) -> torch.Tensor:
        """Return `x` […, *shape] centred and divided by the deviation, in its dtype; gradients flow through."""
        x, fit, dtype = self._prepare_input(x)
        return self._clip_values((x - fit.mean).sub_(fit.rounding_error).div_(fit.scale)).to(dtype)

    def scale(self, x: Any) -> torch.Tensor:
        """Return `x` divided by the deviation but not centred: for rewards and returns, whose sign matters."""
        x, fit, dtype = self._prepare_input(x)
        return self._clip_values(x / fit.scale).to(dtype)

    def denormalize(self, x: Any) -> torch.Tensor:
        """Return the inverse of `normalize`, except for clipping."""
        x, fit, dtype = self._prepare_input(x)
        return (x * fit.scale).add_(fit.rounding_error).add_(fit.mean).to(dtype)

    def _prepare_input(self, x: Any) -> tuple[torch.Tensor, _RoundedMoments, torch.dtype]:
        """Return `x` in the dtype of the arithmetic, the fit in that dtype, and the dtype of the result."""
        x, _ = self._convert_input(x)
        dtype = x.dtype if x.is_floating_point() else torch.float32
        # An integer may have more digits than float32 represents.
        compute_dtype = torch.promote_types(dtype, torch.float32) if x.is_floating_point() else torch.float64
        return x.to(compute_dtype), self._round_moments(compute_dtype), dtype

    def _round_moments(self, dtype: torch.dtype) -> _RoundedMoments:
        """Return the mean and deviation of all rows in `dtype`, from a cache unless an update followed."""
        with lock:
            tensors, fit = self._tensors, self._cached_fit
            # Native counters change the moments without deleting the cached fit, so the numbers of rows are compared.
            count = float(tensors["count"]) if self._counters is not None else None
            if fit is None or fit.num_rows != count or fit.mean.dtype is not dtype:
                # The fit is computed outside inference mode, because training uses the cached fit too.
                with torch.inference_mode(False):
                    mean = tensors["mean"].to(dtype, copy=True)
                    scale = torch.where(tensors["count"] > 0, (self._compute_variance(tensors) + self.eps).sqrt(), 1.0)
                    rounding_error = (tensors["mean"] - mean).to(dtype)
                    self._cached_fit = fit = _RoundedMoments(count, mean, rounding_error, scale.to(dtype))
            return fit

    def _clip_values(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.clip is None else x.clamp(-self.clip, self.clip)

    def _convert_input(self, x: Any) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Return `x` as a tensor of real numbers on the device, with its gradient, and its leading shape."""
        is_plain = isinstance(x, torch.Tensor) and x.layout == torch.strided and x.dtype in DTYPES
        tensor = x if is_plain and x.device == self.device else as_tensor("x", x, self.device).to(self.device)
        num_leading = tensor.ndim - len(self.shape)
        if num_leading < 0 or tuple(tensor.shape[num_leading:]) != self.shape or tensor.is_complex():
            shape = ", ".join(["…", *map(str, self.shape)])
            got = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            raise SchemaError(explain("x", f"real numbers of shape ({shape})", got, "Pass rows of the norm's shape."))
        return tensor, tuple(tensor.shape[:num_leading])

    @property
    def count(self) -> int:
        """Number of rows."""
        return int(self._tensors["count"])

    @property
    def mean(self) -> torch.Tensor:
        """Mean of the rows, float64 [shape]; 0 before the first row."""
        return self.snapshot()["mean"]

    @property
    def var(self) -> torch.Tensor:
        """Variance of the population, float64 [shape]; 1 before the first row."""
        return self._compute_variance(self.snapshot())

    @staticmethod
    def _compute_variance(moments: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.where(moments["count"] > 0, moments["squares"] / moments["count"].clamp(min=1), 1.0)

    @property
    def std(self) -> torch.Tensor:
        """Standard deviation, the root of `var`."""
        return self.var.sqrt()

    def check(self) -> None:
        """Verify that the moments are consistent with the number of rows; NaN moments are allowed."""
        for name, tensor in self._tensors.items():
            verify_layout(f"norm: {name}", tensor, () if name == "count" else self.shape, torch.float64, self.device)
        # Tensors on the meta device have no values, so only their layout is checked.
        if self.device.type == "meta":
            return
        count, mean, squares = self.snapshot().values()
        rows = float(count)
        is_valid = 0 <= rows < _MAX_ROWS and rows.is_integer()
        verify(is_valid, "norm: count", "a whole number of rows", rows)
        verify_elements(~(squares < 0), "norm: squares", "numbers of at least 0", squares)
        for name, moment in (("mean", mean), ("squares", squares)):
            verify_elements((moment == 0) | (count > 0), f"norm: {name}", "0 before the first row", moment)

    def config(self) -> list[Any]:
        """Return the constructor's arguments as JSON."""
        return [list(self.shape), self.eps, self.clip]


Norms: TypeAlias = Mapping[str, RunningNorm] | Mapping[Path, RunningNorm] | Mapping[str | Path, RunningNorm]
"""Norms by field or path; the union lists every type of keys, because the keys of a Mapping are invariant."""
