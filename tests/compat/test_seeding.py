"""Adapters without a seed repeat after `torch.manual_seed`, differ otherwise, and leave global generators alone."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from relive.compat.seeding import experiment_seed

CODE = """
import os, sys, torch
from relive.compat.seeding import experiment_seed
for before in sys.argv[1:]:
    if os.fork() == 0:  # a process that has made no seed yet
        exec(before)
        print(experiment_seed(), torch.rand(1) and experiment_seed(), flush=True)
        os._exit(0)
    os.wait()
"""


def made_after(*codes: str) -> list[list[str]]:
    """The seeds that new processes make, each after its code."""
    lines = subprocess.check_output([sys.executable, "-c", CODE, *codes], text=True).splitlines()
    return [line.split() for line in lines]


@pytest.fixture(scope="module")
def seeds() -> dict[str, list[str]]:
    """What new processes make, each after some code: they are forked from one, as to import torch takes seconds."""
    rank = "os.environ['RANK'] = '{}'; torch.manual_seed(0)"
    cases = {
        "seed 3": "torch.manual_seed(3)", "seed 3 again": "torch.manual_seed(3)", "seed 4": "torch.manual_seed(4)",
        "no seed": "", "rank 0": rank.format(0), "rank 1": rank.format(1),
    }  # fmt: skip
    return dict(zip(cases, made_after(*cases.values()), strict=True))


def test_a_seeded_process_repeats_its_seeds_and_has_others_when_torch_has_drawn(seeds: dict[str, list[str]]) -> None:
    assert seeds["seed 3"] == seeds["seed 3 again"]
    assert len({*seeds["seed 3"], *seeds["seed 4"]}) == 4


@pytest.mark.thorough
def test_a_process_that_nobody_seeded_takes_the_entropy_of_the_system(seeds: dict[str, list[str]]) -> None:
    (again,) = made_after("")  # of its own parent: a fork inherits what torch drew
    assert not {*seeds["no seed"]} & {*again}


def test_ranks_differ(seeds: dict[str, list[str]]) -> None:
    assert seeds["rank 0"] != seeds["rank 1"]


def test_the_same_seed_in_the_same_process_gives_the_same_seeds() -> None:
    with torch.random.fork_rng():
        found = []
        for seed in (5, 5, 6):
            torch.manual_seed(seed)
            found.append([experiment_seed(), torch.rand(1) and experiment_seed()])
    assert found[0] == found[1] != found[2]


def test_no_global_generator_moves() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        before, numbers = torch.random.get_rng_state(), np.random.get_state()  # noqa: NPY002 (that it stays is the test)
        experiment_seed()
        assert torch.equal(torch.random.get_rng_state(), before)
        np.testing.assert_equal(np.random.get_state(), numbers)  # noqa: NPY002


@pytest.mark.parametrize("seed", [0, 2**63 - 1, -1])
def test_any_seed_that_torch_takes_is_taken(seed: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = experiment_seed()
    assert 0 <= made < 2**63
