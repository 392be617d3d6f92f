"""Prioritized experience replay: draws rows in proportion to their priority, with importance weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from relive import kernels
from relive.errors import (
    IncompatibleCheckpoint,
    InvariantError,
    NotReadyError,
    PriorityError,
    SchemaError,
    explain,
    verify,
)
from relive.replay.backend import Backend
from relive.replay.ring import TRANSITION
from relive.replay.samplers.sampler import Choice, Sampler
from relive.rng import Randomness
from relive.schema.checks import check_choice, check_finite, check_fraction, check_number, check_positive_int
from relive.schema.conversion import as_numpy_if_cpu
from relive.schema.invariants import verify_elements
from relive.schema.suggestions import suggests_init_keywords


@dataclass(frozen=True)
class Linear:
    """Linear schedule from `start` to `end` over the first `draws` calls of `sample`, constant afterwards.

    Unlike a function, it is saved in checkpoints, handles and pickles of the buffer.

    Args:
        start: value at the first call.
        end: value after `draws` calls.
        draws: number of calls of `sample`, at least 1.

    >>> beta = Linear(0.4, 1.0, 3)
    >>> [round(beta(draws), 1) for draws in (0, 1, 2, 3, 4)]
    [0.4, 0.6, 0.8, 1.0, 1.0]
    """

    start: float
    end: float
    draws: int

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            if not math.isfinite(check_number(f"Linear.{name}", getattr(self, name))):
                remedy = "Pass such a number."
                raise SchemaError(explain(f"Linear.{name}", "a finite number", getattr(self, name), remedy))
        check_positive_int("Linear.draws", self.draws)

    def __call__(self, draws: int) -> float:
        """Return the value after `draws` calls."""
        share = min(draws / self.draws, 1.0)
        return float((1.0 - share) * self.start + share * self.end)


@suggests_init_keywords
@dataclass(unsafe_hash=True)
class Prioritized(Sampler):
    """Draws row i with probability p_i / Σp, where p = (priority + eps)^alpha.

    weight_i = (M · P(i))^-beta for M rows, divided by the largest weight: (p_min / p_i)^beta in (0, 1], since M and Σp
    cancel. A new row gets the largest priority accepted so far, initially 1. (Schaul et al., Prioritized
    Experience Replay, 2016.)

    Args:
        alpha: exponent of priorities: 0 draws uniformly, 1 in proportion to them.
        beta: exponent of weights, from 0 (no correction of the bias) to 1 (full correction): a number, a `Linear`
            schedule, or a function of the number of rows drawn so far, which checkpoints cannot hold.
        eps: added to every priority. With 0, a row of priority 0 is never drawn.
        normalize: the weight that becomes 1: the largest of the batch ("batch"), or the largest possible weight of any
            stored row ("global").
    """

    alpha: float = 0.6
    beta: float | Linear | Callable[[int], float] = 0.4
    eps: float = 1e-6
    normalize: Literal["batch", "global"] = "batch"

    returns_weights = True
    keeps_state_in_memory = True
    optional_state = frozenset({"calls"})

    def __post_init__(self) -> None:
        for name in ("alpha", "eps"):
            check_finite(f"Prioritized.{name}", getattr(self, name))
        ends = (self.beta.start, self.beta.end) if isinstance(self.beta, Linear) else (self.beta,)
        for beta in ends:
            if not callable(beta):
                _check_beta(beta)
        try:
            first_mass = (1.0 + float(self.eps)) ** float(self.alpha)
        except OverflowError:
            first_mass = math.inf
        if not math.isfinite(first_mass):
            expected = "(1 + eps)^alpha, the mass of a first row, to be finite"
            remedy = "Lower alpha or eps."
            raise SchemaError(explain("Prioritized", expected, f"alpha={self.alpha}, eps={self.eps}", remedy))
        check_choice("Prioritized.normalize", self.normalize, ("batch", "global"))

    def bind(self, storage: Backend, rng: Randomness) -> Prioritized:
        """Return a bound copy: a `_DevicePrioritized` if the priority tree verifies priorities on the device."""
        if storage.priority_tree().keeps_largest and not isinstance(self, _DevicePrioritized):
            return _DevicePrioritized(self.alpha, self.beta, self.eps, self.normalize).bind(storage, rng)
        return super().bind(storage, rng)

    def on_bind(self) -> None:
        self._ring = self.storage.ring
        self.tree = self.storage.priority_tree()
        """The tree of masses p by slot. Masked writes go to its unused last leaf, which needs no synchronisation."""
        self._slots = self.tree.num_leaves - 1
        self._new_row_mass = 1.0, self.compute_mass(1.0)
        """Priority of new rows and the mass of this priority, cached."""
        self._numbers: Any = [1.0, 0]
        """Largest accepted priority (a tensor on other devices), and the number of drawn rows."""
        allocator = self.storage.allocator
        if allocator.persistent:
            self._numbers = allocator.allocate("sampler.numbers", (2,), torch.float64).numpy()
            if not allocator.reopened:
                self._max_priority = 1.0
        self._calls: Any = None
        """Number of calls of `sample` [1]; None unless `beta` is a `Linear`."""
        if isinstance(self.beta, Linear):
            self._calls = (
                allocator.allocate("sampler.calls", (1,), torch.int64).numpy() if allocator.persistent else [0]
            )

    @property
    def _max_priority(self) -> Any:
        return self._numbers[0]

    @_max_priority.setter
    def _max_priority(self, largest: Any) -> None:
        self._numbers[0] = largest

    @property
    def num_drawn(self) -> int:
        """Number of rows drawn so far."""
        return int(self._numbers[1])

    @num_drawn.setter
    def num_drawn(self, count: int) -> None:
        self._numbers[1] = count

    @property
    def _num_sample_calls(self) -> int:
        return 0 if self._calls is None else int(self._calls[0])

    def sample(self, count: int) -> Choice:
        return self._draw_slots(count, None)

    def sample_into(self, count: int, weight: torch.Tensor) -> torch.Tensor:
        return self._draw_slots(count, weight)[0]

    def _draw_slots(self, count: int, weight: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        beta = self._compute_current_beta()
        batch = self.tree.draw_weighted(count, self.rng, beta, self.normalize == "global", weight)
        if batch is None:
            remedy = "Update at least one priority to more than 0, or use eps > 0."
            raise NotReadyError(explain("sample", "a row of positive priority", "only zeros", remedy))
        self.num_drawn += count
        if self._calls is not None:
            self._calls[0] += 1
        return batch

    def _compute_current_beta(self) -> float:
        if callable(self.beta) and is_capturing_graph(self.storage.device):
            remedy = "Pass a number as beta, or sample outside the graph."
            expected = "a number while a CUDA graph is captured, which would repeat one value"
            raise SchemaError(explain("Prioritized.beta", expected, "a schedule", remedy))
        return self.compute_beta(self.num_drawn, self._num_sample_calls)

    def update(self, slots: torch.Tensor, priority: torch.Tensor) -> torch.Tensor | int:
        counts = self.tree.update_priorities(slots, priority, self.alpha, self.eps, self._numbers)
        if counts is not None and counts[0] < 0:
            return counts[1]
        values, mass = self.convert_priorities(priority, len(slots))
        is_skipped = slots < 0
        largest = self._max_priority
        if len(values):
            largest = self._find_new_max_priority(as_numpy_if_cpu(values.masked_fill(is_skipped, 0.0)).max())
        leaves, masses = slots.masked_fill(is_skipped, self._slots), mass.masked_fill_(is_skipped, 0.0)
        kernels.complete(partial(self._set_masses, leaves, masses, largest))
        stale = as_numpy_if_cpu(is_skipped).sum()
        return stale if isinstance(stale, torch.Tensor) else int(stale)

    def _find_new_max_priority(self, batch_max: Any) -> Any:
        if isinstance(batch_max, torch.Tensor):
            return batch_max.clamp_(min=self._max_priority)
        return max(self._max_priority, float(batch_max))

    def _set_masses(self, leaves: torch.Tensor, masses: torch.Tensor, largest: Any) -> None:
        self.tree.set(leaves, masses)
        self._max_priority = largest

    def after_write(self) -> None:
        largest = self._max_priority
        # On a device the largest priority is a tensor, whose comparison with the last one would synchronise.
        if not isinstance(largest, float):
            self.storage.set_mass_of_written_rows(self.compute_mass(largest))
            return
        if largest != self._new_row_mass[0]:
            self._new_row_mass = largest, self.compute_mass(largest)
        self.storage.set_mass_of_written_rows(self._new_row_mass[1])

    def on_clear(self) -> None:
        self.tree.set(torch.arange(self._slots, device=self.storage.device), 0.0)
        self._max_priority = 1.0

    def on_recover(self) -> None:
        self._check_largest_and_counts()
        ring, leaves = self._ring, self.tree.leaves_view()
        slots, is_drawable = leaves[:-1], ring.kind.view(-1) == TRANSITION
        has_mass = (slots > 0) | (self.eps == 0)
        slots.copy_(torch.where(is_drawable, torch.where(has_mass, slots, self.compute_mass(self._max_priority)), 0.0))
        leaves[-1] = 0.0
        self.tree.rebuild()

    def state(self) -> dict[str, torch.Tensor]:
        largest = torch.as_tensor(self._max_priority, dtype=torch.float64, device=self.storage.device)
        draws = torch.tensor(self.num_drawn, device="cpu")
        state = {"mass": self.tree.leaves_view()[: self._slots], "largest": largest, "draws": draws}
        return state if self._calls is None else {**state, "calls": torch.tensor(self._num_sample_calls, device="cpu")}

    def owned_arrays(self) -> tuple[torch.Tensor, ...]:
        # The base method is not used, because it reads `state`, which makes new tensors in every call.
        return (self.tree.leaves_view(),) if self.is_ours else ()

    def load_state(self, saved: Mapping[str, torch.Tensor]) -> None:
        mass, largest = saved["mass"], float(saved["largest"])
        if len(mass) != self._slots or not bool((torch.isfinite(mass) & (mass >= 0)).all()):
            raise ValueError(f"priorities: expected {self._slots} finite numbers of at least 0")
        if not 0 <= largest < float("inf"):
            raise ValueError(f"the largest priority: expected a finite number of at least 0, got {largest}")
        self.tree.leaves_view()[: self._slots].copy_(mass)
        self.tree.rebuild()
        largest_on_device = saved["largest"].to(self.storage.device)
        self._max_priority = largest_on_device if as_numpy_if_cpu(largest_on_device) is largest_on_device else largest
        self.num_drawn = int(saved["draws"])
        if self._calls is not None:
            self._calls[0] = int(saved["calls"])

    def rescale_priorities(self, alpha: float, eps: float) -> None:
        if (alpha, eps) == (self.alpha, self.eps):
            return
        if alpha == 0:
            expected = f"alpha={alpha} and eps={eps}, which has kept no priorities,"
            got, remedy = f"alpha={self.alpha} and eps={self.eps}", "Load it with these."
            raise IncompatibleCheckpoint(explain("sampler", expected, got, remedy))
        slots = self.tree.leaves_view()[: self._slots]
        priority = (slots.pow(1 / alpha) - eps).clamp(min=0)
        mass = torch.where(self._ring.kind.view(-1) == TRANSITION, self.compute_mass(priority), 0.0)
        if not bool(mass.isfinite().all()):
            raise ValueError(f"priorities of up to {float(priority.max())}: too large for {self}")
        slots.copy_(mass)
        self.tree.rebuild()

    def check(self) -> None:
        """Verify that exactly the transitions have a priority, and that the tree's sums are right."""
        ring, leaves = self._ring, self.tree.leaves_view()
        verify(len(leaves) == self._slots + 1, "priorities", self._slots + 1, len(leaves))
        slots, unused_mass = leaves[:-1].view(ring.slots, ring.num_envs), leaves[-1]
        is_drawable = ring.kind == TRANSITION
        verify_elements(slots.isfinite() & (slots >= 0), "priority", "a finite number of at least 0", slots)
        verify_elements(is_drawable | (slots == 0), "priority", "0 where there is no transition", slots)
        may_be_zero = ~is_drawable | (self.eps == 0)
        verify_elements((slots > 0) | may_be_zero, "priority", "more than 0 for a transition", slots)
        verify(unused_mass == 0, "priority of no row", 0, float(unused_mass))
        self._check_largest_and_counts()
        error = self.tree.max_sum_error()
        verify(
            error <= 1e-9, "sums of priorities", "the sums over the rows, to 1e-9", f"a relative error of {error:.1e}"
        )

    def _check_largest_and_counts(self) -> None:
        """Verify the largest priority and the counts, which may come from a file."""
        largest, draws = float(self._numbers[0]), float(self._numbers[1])
        verify(1 <= largest < math.inf, "largest priority", "a finite number of at least 1", largest)
        for name, count in (("draws", draws), ("calls", self._num_sample_calls)):
            verify(0 <= count < 1 << 62 and count == int(count), name, "a number of at least 0", count)

    def total_mass(self) -> tuple[float, int]:
        """Return the total mass as (mantissa, exponent) of base 2, because a sum of large masses may exceed float64."""
        total = float(self.tree.total_priority())
        if math.isfinite(total):
            return math.frexp(total)
        mantissa, exponent = math.frexp(float((self.tree.leaves_view() * 2.0**-64).sum()))
        return mantissa, exponent + 64

    def smallest_mass(self) -> float:
        """Return the smallest mass above zero; infinity without one."""
        return float(self.tree.smallest_priority())

    def masses(self, slots: torch.Tensor | None = None) -> torch.Tensor:
        """Return the masses at slots, float64 [K], or a copy of the masses at all slots; empty slots have mass 0."""
        return self.tree.leaves_view()[: self._slots].clone() if slots is None else self.tree.get(slots)

    def merge_max_priority(self, other: float = 0.0) -> float:
        """Raise the priority of new rows to at least `other`, which is the largest one of other shards; return it."""
        self._max_priority = max(self._max_priority, other)
        return float(self._max_priority)

    def compute_mass(self, priority: Any) -> Any:
        """Return (priority + eps)^alpha, at least 5e-324 for a positive base, so that the row can be drawn."""
        base = priority + self.eps
        if isinstance(base, float):
            return max(base**self.alpha, 5e-324) if base else 0.0
        mass = base.pow(self.alpha)
        # Every base is at least eps, so if eps^alpha is positive, no mass underflows to 0.
        if self.eps**self.alpha > 0 and self.eps:
            return mass
        return mass.clamp_(min=5e-324).masked_fill_(base == 0, 0.0)

    def convert_priorities(self, priority: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return new priorities as float64 [count] and their masses; raises if a priority is invalid.

        Values are verified only on the CPU: elsewhere that would synchronise.
        """
        check_priorities(priority, count)
        values = priority.to(torch.float64)
        mass = self.compute_mass(values)
        host_values, masses = as_numpy_if_cpu(values), as_numpy_if_cpu(mass)
        # On the CPU numpy checks the values in less time than several torch ops.
        if (
            isinstance(host_values, np.ndarray)
            and not ((host_values >= 0) & np.isfinite(host_values) & np.isfinite(masses)).all()
        ):
            refuse_invalid_priorities(~(torch.isfinite(values) & (values >= 0) & torch.isfinite(mass)), values)
        return values, mass

    def compute_beta(self, num_rows: int, num_calls: int) -> float:
        """Return the exponent of weights after `num_rows` drawn rows and `num_calls` calls of `sample`."""
        if not callable(self.beta):
            return float(self.beta)
        return _check_beta(self.beta(num_calls if isinstance(self.beta, Linear) else num_rows))


class _DevicePrioritized(Prioritized):
    """Prioritized sampling on a device, with one or two kernel launches per update, draw and write.

    Faults that only the device can detect are counted there, and `check()` raises for them: invalid priorities, ids
    that were never issued, and draws from a buffer whose priorities are all zero.
    """

    # `repr` prints this name, so users see the public class.
    __qualname__ = "Prioritized"
    __hash__ = Prioritized.__hash__
    updates_by_id = True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Prioritized) and astuple(self) == astuple(other)

    def on_bind(self) -> None:
        super().on_bind()
        self.tree: Any
        self._numbers = [self.tree.largest, 0]
        if self.normalize == "global":
            # `smallest` is called once, because its first call makes the tree maintain its minima from now on.
            self.tree.smallest_priority()

    @property
    def _max_priority(self) -> Any:
        return self.tree.largest

    @_max_priority.setter
    def _max_priority(self, largest: Any) -> None:
        self.tree.largest.fill_(largest)

    def update(self, slots: torch.Tensor, priority: torch.Tensor) -> torch.Tensor:
        """Set the priorities of the rows with these ids; returns how many rows were overwritten and skipped."""
        check_priorities(priority, len(slots))
        return self.tree.set_priorities(slots, priority, self.alpha, self.eps, self._ring)

    def after_write(self) -> None:
        slots, changed = self.storage.changed_slots()
        self.tree.set_written_slots(slots, changed, self._ring.kind, self.alpha, self.eps)

    def on_clear(self) -> None:
        self.tree.leaves_view().zero_()
        self.tree.rebuild()
        self._max_priority = 1.0

    def find_input_faults(self) -> Iterator[str]:
        invalid_priorities, unknown_ids, empty_draws = self.tree.faults.tolist()
        if invalid_priorities:
            expected = "finite numbers of at least 0 (and finite to the power of alpha)"
            yield explain(
                "priority", expected, f"{invalid_priorities} others, skipped", "Pass absolute errors that are finite."
            )
        if unknown_ids:
            got, remedy = f"{unknown_ids} others in update_priority, skipped", "Pass ids from batch['index']."
            yield explain("index", "ids of stored transitions", got, remedy)
        if empty_draws:
            remedy = "Update at least one priority to more than 0, or use eps > 0."
            yield explain("sample", "a row of positive priority", f"only zeros in {empty_draws} batches", remedy)

    def check(self) -> None:
        super().check()
        for fault in self.find_input_faults():
            raise InvariantError(fault)


def is_capturing_graph(device: torch.device) -> bool:
    """Whether launches on a device are currently captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def check_priorities(priority: torch.Tensor, count: int) -> None:
    """Raise if priorities have the wrong shape or dtype for `count` rows; values are not checked."""
    if tuple(priority.shape) != (count,):
        remedy = "Pass a priority for each index."
        raise SchemaError(explain("priority", f"shape ({count},)", tuple(priority.shape), remedy))
    if priority.dtype == torch.bool or priority.is_complex():
        raise SchemaError(explain("priority", "real numbers", priority.dtype, "Pass absolute errors."))


def _check_beta(value: Any) -> float:
    return check_fraction("Prioritized.beta", value, "0 corrects nothing of the bias, 1 all of it.")


def refuse_invalid_priorities(is_invalid: torch.Tensor, values: torch.Tensor) -> None:
    """Raise a PriorityError for the first invalid priority, if there is one."""
    if is_invalid.any():
        position = int(is_invalid.nonzero()[0])
        expected = "a finite number of at least 0 (and finite to the power of alpha)"
        remedy = "Pass absolute errors that are finite."
        raise PriorityError(explain(f"priority[{position}]", expected, float(values[position]), remedy))


def sequence_priority(error: torch.Tensor, mask: torch.Tensor, *, eta: float = 0.9) -> torch.Tensor:
    """priority = η · max |δ| + (1 − η) · mean |δ| over the steps of a sequence that `mask` selects.

    (Kapturowski et al., Recurrent Experience Replay in Distributed Reinforcement Learning, 2019.) The priority is 0 if
    `mask` selects no step.

    Args:
        error: TD errors δ [B, L], of any sign.
        mask: steps to include, bool [B, L]: `batch["train"]` excludes burn-in and padding.
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
    check_fraction("eta", eta)
    size = error.detach().abs().masked_fill(~mask, 0.0)
    # Errors are summed in float32 or float64, because a sum in float16 would overflow.
    size = size if size.dtype == torch.float64 else size.float()
    mean = size.sum(1) / mask.sum(1).clamp(min=1)
    return eta * size.amax(1) + (1 - eta) * mean if error.shape[1] else mean
