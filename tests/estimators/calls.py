"""Calls of every estimator over time: the public function, and the written-out reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from relive import estimators
from tests.conftest import BACKENDS
from tests.reference import estimators as reference
from tests.strategies import Rollout

ARGUMENTS = {
    "gae": ("reward", "value", "next_value", "terminated", "truncated"),
    "lambda_return": ("reward", "next_value", "terminated", "truncated"),
    "n_step_return": ("reward", "next_value", "terminated", "truncated"),
    "vtrace": ("log_ratio", "reward", "value", "next_value", "terminated", "truncated"),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "gae": {"gamma": 0.9, "lam": 0.8},
    "lambda_return": {"gamma": 0.9, "lam": 0.8},
    "n_step_return": {"gamma": 0.9, "n": 3},
    "vtrace": {"gamma": 0.9, "lam": 0.8, "rho_bar": 1.1, "c_bar": 0.9},
}
NAMES = tuple(ARGUMENTS)

every_backend = pytest.mark.parametrize("backend_name", BACKENDS)
every_estimator = pytest.mark.parametrize("name", NAMES)


def call(name: str, tensors: dict[str, Tensor | None], **settings: Any) -> tuple[Tensor, ...]:
    """Call the public function with the tensors that it needs; return a tuple."""
    estimator = getattr(estimators, name)
    result = estimator(*(tensors[k] for k in ARGUMENTS[name]), **settings, mask=tensors["mask"])
    return result if isinstance(result, tuple) else (result,)


def expected(name: str, rollout: Rollout, **settings: Any) -> list[Tensor]:
    return reference.by_column(getattr(reference, name), rollout.tensors, **settings)


def assert_equal(got: Tensor, want: Tensor) -> None:
    """Assert equality up to the rounding of the computation's dtype; NaN equals NaN."""
    tolerance = 2e-4 if got.dtype == torch.float32 else 1e-9
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def sample(
    steps: int, *axes: int, dtype: torch.dtype = torch.float32, ends: float = 0.1, seed: int = 0
) -> dict[str, Tensor | None]:
    """Return the tensors of one fixed rollout, without Hypothesis."""
    generator = torch.Generator().manual_seed(seed)
    numbers = {
        name: torch.randn(steps, *axes, generator=generator, dtype=dtype)
        for name in ("reward", "value", "next_value", "log_ratio")
    }
    flags = {name: torch.rand(steps, *axes, generator=generator) < ends for name in ("terminated", "truncated")}
    return {**numbers, **flags, "mask": None}
