"""Adapters without a seed repeat after `torch.manual_seed`, differ otherwise, and leave global generators alone."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from relive.compat.seeding import choose_seed

CODE = """
import os, sys, torch
from relive.compat.seeding import choose_seed
for before in sys.argv[1:]:
    if os.fork() == 0:  # a process that has made no seed yet
        exec(before)
        print(choose_seed(), torch.rand(1) and choose_seed(), flush=True)
        os._exit(0)
    os.wait()
"""


def run_processes(*codes: str) -> list[list[str]]:
    """Run each code in a new process and return the seeds that it prints."""
    lines = subprocess.check_output([sys.executable, "-c", CODE, *codes], text=True).splitlines()
    return [line.split() for line in lines]


@pytest.fixture(scope="module")
def seeds() -> dict[str, list[str]]:
    """Return the seeds of new processes by case, forked from one process since importing torch takes seconds."""
    rank = "os.environ['RANK'] = '{}'; torch.manual_seed(0)"
    cases = {
        "seed 3": "torch.manual_seed(3)", "seed 3 again": "torch.manual_seed(3)", "seed 4": "torch.manual_seed(4)",
        "no seed": "", "rank 0": rank.format(0), "rank 1": rank.format(1),
    }  # fmt: skip
    return dict(zip(cases, run_processes(*cases.values()), strict=True))


def test_a_seeded_process_repeats_its_seeds_and_a_draw_of_torch_changes_them(seeds: dict[str, list[str]]) -> None:
    assert seeds["seed 3"] == seeds["seed 3 again"]
    assert len({*seeds["seed 3"], *seeds["seed 4"]}) == 4


@pytest.mark.thorough
def test_unseeded_processes_have_different_seeds(seeds: dict[str, list[str]]) -> None:
    # A process of another parent: forks of one parent inherit the seed that torch drew in the parent.
    (again,) = run_processes("")
    assert not {*seeds["no seed"]} & {*again}


def test_processes_of_different_ranks_have_different_seeds(seeds: dict[str, list[str]]) -> None:
    assert seeds["rank 0"] != seeds["rank 1"]


@pytest.mark.parametrize("seed", [0, 2**63 - 1, -1])
def test_every_seed_of_torch_is_accepted(seed: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = choose_seed()
    assert 0 <= made < 2**63
