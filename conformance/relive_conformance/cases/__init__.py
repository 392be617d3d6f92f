"""The cases, by subject."""

from __future__ import annotations

from relive_conformance.case import Case
from relive_conformance.cases import (
    autoreset,
    borders,
    draws,
    estimators,
    frames,
    hindsight,
    n_step,
    priorities,
    rows,
    saving,
    sequences,
    threads,
)

_SUBJECTS = (
    estimators, autoreset, rows, n_step, priorities, draws, hindsight, sequences, saving, threads, borders, frames,
)  # fmt: skip

CASES: tuple[Case, ...] = tuple(
    sorted((case for subject in _SUBJECTS for case in subject.CASES), key=lambda case: int(case.number[1:]))
)
"""All cases, in the order of their numbers."""
