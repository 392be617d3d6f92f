"""Adapters without a seed repeat in a seeded experiment, differ otherwise, and leave global generators alone."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from relive.compat.seeding import experiment_seed

CODE = """
import torch
from relive.compat.seeding import experiment_seed
{before}
print(experiment_seed(), experiment_seed())
"""


def seeds_of_a_process(before: str) -> list[str]:
    """What a new process makes after the code `before`."""
    return subprocess.check_output([sys.executable, "-c", CODE.format(before=before)], text=True).split()


def test_a_seeded_process_repeats_its_seeds_and_gives_each_buffer_its_own() -> None:
    first, again, other = (seeds_of_a_process(f"torch.manual_seed({seed})") for seed in (3, 3, 4))
    assert first == again
    assert len({*first, *other}) == 4


def test_a_process_that_nobody_seeded_takes_the_entropy_of_the_system() -> None:
    assert not {*seeds_of_a_process("")} & {*seeds_of_a_process("")}


def test_ranks_differ() -> None:
    rank = "import os; os.environ['RANK'] = '{}'; torch.manual_seed(0)"
    assert seeds_of_a_process(rank.format(0)) != seeds_of_a_process(rank.format(1))


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
