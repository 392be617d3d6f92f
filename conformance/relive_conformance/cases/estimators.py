"""T1, T2: an end belongs to the step that caused it, and a truncated step bootstraps."""

from __future__ import annotations

import numpy as np

from relive_conformance.adapters.off_policy import Array, NotOffered
from relive_conformance.adapters.protocol import Adapter, Gae, Trajectory
from relive_conformance.case import Case
from relive_conformance.outcome import expect_equal


def column(numbers: list[float], dtype: type = np.float32) -> Array:
    """Reshape numbers [T] of one environment to [T, 1]."""
    return np.array(numbers, dtype)[:, None]


INSIDE = Trajectory(
    reward=column([1, 1, 1]),
    value=column([0, 0, 10]),
    next_value=column([0, 10, 0]),
    terminated=column([0, 1, 0], bool),
    truncated=column([0, 0, 0], bool),
)
CUT_OFF = Trajectory(
    reward=column([1, 1, 1]),
    value=column([0, 0, 10]),
    next_value=column([0, 5, 0]),
    terminated=column([0, 0, 0], bool),
    truncated=column([0, 1, 0], bool),
)


def estimators(adapter: Adapter) -> list[type[Gae]]:
    """Return the library's estimators of advantages by name."""
    available = [estimator for estimator in (adapter.gae, adapter.collected) if estimator is not None]
    if not available:
        raise NotOffered("no advantage estimator")
    return available


def returns(estimator: type[Gae], trajectory: Trajectory, *, gamma: float = 1.0, lam: float = 1.0) -> Array:
    """Return the returns [T, N] of one estimator."""
    instance = estimator()
    return instance.read(instance.prepare(trajectory, gamma=gamma, lam=lam)())[1]


def check_ends(adapter: Adapter) -> None:
    for estimator in estimators(adapter):
        expect_equal("returns", returns(estimator, INSIDE), column([2, 1, 1]), 1e-5)


def check_truncations(adapter: Adapter) -> None:
    for estimator in estimators(adapter):
        expect_equal("returns", returns(estimator, CUT_OFF), column([7, 6, 1]), 1e-5)


CASES = (
    Case(
        "T1",
        "an end inside a rollout",
        "GAE with an episode's end inside: reward [1, 1, 1], value [0, 0, 10], terminated after step 1, γ = λ = 1.",
        "returns [2, 1, 1]",
        check_ends,
    ),
    Case(
        "T2",
        "time limit bootstraps",
        "The same with a truncation whose final observation has the value 5: bootstrapped, and the chain is cut.",
        "returns [7, 6, 1]",
        check_truncations,
    ),
)
