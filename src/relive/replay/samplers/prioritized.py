"""Rows in proportion to their priority, with the weights that make up for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from relive.errors import PriorityError, SchemaError, explain
from relive.fields.conversion import as_numpy_if_cpu
from relive.fields.schema import is_finite_number, positive
from relive.fields.vocabulary import suggests_init_keywords
from relive.randomness import Randomness
from relive.replay.samplers.device_priority_run import DevicePriorityRun
from relive.replay.samplers.priority_run import PriorityRun, check_priorities
from relive.replay.store import ReplayStore


@dataclass(frozen=True)
class Linear:
    """A number that goes from `start` to `end` over the first `draws` calls of `sample`, and stays there.

    A schedule that is data: it is saved with the buffer, and goes with its handles and pickles.

    Args:
        start: the number at the first call.
        end: the number after `draws` calls.
        draws: how many calls of `sample` it takes, at least 1.

    >>> beta = Linear(0.4, 1.0, 3)
    >>> [round(beta(draws), 1) for draws in (0, 1, 2, 3, 4)]
    [0.4, 0.6, 0.8, 1.0, 1.0]
    """

    start: float
    end: float
    draws: int

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            if not is_finite_number(getattr(self, name)):
                remedy = "Pass such a number."
                raise SchemaError(explain(f"Linear.{name}", "a finite number", repr(getattr(self, name)), remedy))
        positive("Linear.draws", self.draws)

    def __call__(self, draws: int) -> float:
        """The number after so many calls."""
        share = min(draws / self.draws, 1.0)
        return float((1.0 - share) * self.start + share * self.end)


@suggests_init_keywords
@dataclass(frozen=True)
class Prioritized:
    """Draws row i with probability p_i / Σp, where p = (priority + eps)^alpha.

    weight_i = (M · P(i))^-beta, divided by the largest weight, so that weights are in (0, 1]. A new row gets the
    largest priority accepted so far, 1 at first. (Schaul et al., Prioritized Experience Replay, 2016.)

    Args:
        alpha: how much priorities count: 0 draws uniformly, 1 in proportion.
        beta: how much of the bias the weights correct, from 0 to 1: a number, a `Linear` over the calls of `sample`, or
            a function of how many rows were drawn so far, which files cannot hold.
        eps: added to every priority. With 0, a row of priority zero is never drawn.
        normalize: which weight becomes 1: the largest of the batch ("batch"), or the largest that any stored row could
            have ("global").
    """

    alpha: float = 0.6
    beta: float | Linear | Callable[[int], float] = 0.4
    eps: float = 1e-6
    normalize: Literal["batch", "global"] = "batch"

    def __post_init__(self) -> None:
        for name in ("alpha", "eps"):
            value = getattr(self, name)
            if not is_finite_number(value) or value < 0:
                expected, remedy = "a finite number of at least 0", "Pass such a number."
                raise SchemaError(explain(f"Prioritized.{name}", expected, repr(value), remedy))
        ends = (self.beta.start, self.beta.end) if isinstance(self.beta, Linear) else (self.beta,)
        for beta in ends:
            if not callable(beta):
                _check_beta(beta)
        if not math.isfinite(_power(1.0 + float(self.eps), float(self.alpha))):
            expected = "(1 + eps)^alpha, the mass of a first row, to be finite"
            remedy = "Lower alpha or eps."
            raise SchemaError(explain("Prioritized", expected, f"alpha={self.alpha}, eps={self.eps}", remedy))
        if self.normalize not in ("batch", "global"):
            remedy = "Pass one of them."
            raise SchemaError(explain("Prioritized.normalize", '"batch" or "global"', repr(self.normalize), remedy))

    @property
    def counts_calls(self) -> bool:
        """Whether `beta` depends on the number of calls of `sample`."""
        return isinstance(self.beta, Linear)

    def start(self, store: ReplayStore, random: Randomness) -> PriorityRun:
        run = DevicePriorityRun if store.tree().keeps_largest else PriorityRun
        return run(self, store, random)

    def mass(self, priority: Any) -> Any:
        """(priority + eps)^alpha, but zero only for zero: what is positive can be drawn."""
        base = priority + self.eps
        if isinstance(base, float):
            return max(base**self.alpha, 5e-324) if base else 0.0
        mass = base.pow(self.alpha)
        if self.eps**self.alpha > 0 and self.eps:  # the smallest of all
            return mass
        return mass.clamp_(min=5e-324).masked_fill_(base == 0, 0.0)

    def accept(self, priority: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """New priorities of `count` rows as float64 [count], and their masses. Raises if any priority is invalid.

        Other devices than the host are not asked.
        """
        check_priorities(priority, count)
        values = priority.to(torch.float64)
        mass = self.mass(values)
        given, masses = as_numpy_if_cpu(values), as_numpy_if_cpu(mass)
        # Arrays: what numpy looks at is no launch.
        if isinstance(given, np.ndarray) and not ((given >= 0) & np.isfinite(given) & np.isfinite(masses)).all():
            refuse_priorities(~(torch.isfinite(values) & (values >= 0) & torch.isfinite(mass)), values)
        return values, mass

    def beta_after(self, rows: int, calls: int) -> float:
        """The exponent of the weights when so many rows were drawn by so many calls of `sample`."""
        if not callable(self.beta):
            return float(self.beta)
        beta = self.beta(calls if isinstance(self.beta, Linear) else rows)
        _check_beta(beta)
        return float(beta)


def _power(base: float, exponent: float) -> float:
    try:
        return base**exponent
    except OverflowError:
        return math.inf


def _check_beta(value: Any) -> None:
    if not (is_finite_number(value) and 0 <= value <= 1):
        remedy = "0 corrects nothing of the bias, 1 all of it."
        raise SchemaError(explain("Prioritized.beta", "a number of 0 to 1", repr(value), remedy))


def refuse_priorities(bad: torch.Tensor, values: torch.Tensor) -> None:
    """Raise for the first of the values that are `bad`."""
    if bad.any():
        at = int(bad.nonzero()[0])
        expected = "a finite number of at least 0 (and finite to the power of alpha)"
        remedy = "Pass absolute errors that are finite."
        raise PriorityError(explain(f"priority[{at}]", expected, float(values[at]), remedy))
