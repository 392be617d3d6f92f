"""K: random histories of calls, saves, loads and faults, compared with a simple model of lists and dicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import relive as rl
from tests.faults.machines.distillation import DistillationMachine
from tests.faults.machines.machine import Machine
from tests.faults.machines.replay import ReplayMachine
from tests.faults.machines.rollout import RolloutMachine
from tests.tiers import select
from tests.totals import tell, trials

SAMPLERS = {"uniform": rl.Uniform(), "prioritized": rl.Prioritized(), "epochs": rl.WithoutReplacement()}
KINDS: Mapping[str, type[Machine]] = {
    f"{layout} {name}": type("Replay", (ReplayMachine,), {"layout": layout, "sampler": sampler})
    for layout in ("shared", "stored", "stacked")
    for name, sampler in SAMPLERS.items()
} | {"rollout": RolloutMachine, "distillation": DistillationMachine}


def live(
    kind: str, histories: int, steps: int, *, phases: tuple[Phase, ...] = tuple(Phase), derandomize: bool = True
) -> None:
    """Run histories of one kind and report the number of calls."""
    ran = Counter[str]()
    machine: Any = type("Run", (KINDS[kind],), {"ran": ran})
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=histories,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=checks,
            print_blob=True,
            phases=phases,
            derandomize=derandomize,
        ),
    )
    tell(f"K1: {kind}, {histories} histories of {steps} steps: {dict(sorted(ran.items()))}")


def share(kind: str, histories: int) -> int:
    """Return the histories per kind: the nine kinds of replay buffers share one number."""
    return histories if kind in ("rollout", "distillation") else -(-histories // 9)


FEW = [("rollout", 25), ("shared prioritized", 27)]
"""Number of histories of each kind in the quick tier."""

JUMPING = pytest.mark.filterwarnings("ignore:obs. expected (a rollout|steps) that start")
"""Observations of the histories jump on purpose."""


@JUMPING
@pytest.mark.promise("K1")
@pytest.mark.parametrize(("kind", "histories"), select(*FEW, of=[*FEW, *((kind, 100) for kind in KINDS)]))
def test_any_history_equals_the_model(kind: str, histories: int) -> None:
    live(kind, share(kind, trials("K1", histories)), 50)


@JUMPING
@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_any_long_history_equals_the_model(kind: str) -> None:
    live(kind, share(kind, trials("K1_LONG", 5_000)), 100, derandomize=False)
