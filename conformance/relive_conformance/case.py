"""A case: a number, a sentence, the expected result, and a check that takes any adapter."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from relive_conformance.adapters.off_policy import NotOffered
from relive_conformance.adapters.protocol import Adapter
from relive_conformance.outcome import DIFFERS, NOT_OFFERED, PASSES, Differs, Outcome

Check = Callable[[Adapter], None]


@dataclass(frozen=True)
class Case:
    """One thing that a correct buffer does."""

    number: str
    title: str
    """A few words, shown with the number everywhere."""
    sentence: str
    expected: str
    check: Check
    """Returns if the adapter passes, otherwise raises `Differs` or `NotOffered`."""
    misuse: bool = False
    """Whether the case passes input that no documentation allows; few libraries promise anything for it."""

    def __str__(self) -> str:
        return self.number

    @property
    def name(self) -> str:
        """The number and the title."""
        return f"{self.number} {self.title}"

    def run(self, adapter: Adapter) -> Outcome:
        """Test one library; an unexpected error of the library counts as a difference."""
        if reason := adapter.notes.get(self.number):
            return Outcome(NOT_OFFERED, reason=reason)
        try:
            with _seeded():
                self.check(adapter)
        except NotOffered as refusal:
            return Outcome(NOT_OFFERED, reason=str(refusal) or "none of this kind")
        except Differs as difference:
            return Outcome(DIFFERS, difference.expected, difference.got)
        except KeyboardInterrupt:
            raise
        # Native libraries also raise errors that are not an Exception; a library that exits has failed.
        except BaseException as error:
            text = " ".join(str(error).split())
            return Outcome(DIFFERS, self.expected, f"{type(error).__name__}: {text[:160]}")
        return Outcome(PASSES)

    def require(self, subject: Any) -> bool:
        """Raise `Differs` if the subject of `as_adapter` does not pass; return False if it does not offer the case."""
        from relive_conformance.target import as_adapter  # noqa: PLC0415 (a target may be made of cases' own parts)

        outcome = self.run(as_adapter(subject))
        if outcome.status == DIFFERS:
            raise Differs(outcome.expected, outcome.got)
        return outcome.status == PASSES


@contextmanager
def _seeded() -> Iterator[None]:
    """Seed the global generators, which some libraries draw from, and restore them afterwards."""
    numpy_state = np.random.get_state()  # noqa: NPY002 (kept and put back)
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    try:
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)
        torch.manual_seed(0)
        yield
    finally:
        np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
