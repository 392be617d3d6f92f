"""Permutations drawn from a buffer's own generator."""

from __future__ import annotations

import torch

from relive.kernels.reader import copy_shuffled, draw_permutation
from relive.rng import Randomness


def test_a_permutation_is_the_shuffled_list_of_all_numbers(backend: str) -> None:
    # The native core releases the GIL while it shuffles the largest one.
    for count in (0, 1, 20_000):
        numbers = torch.arange(count)
        drawn, again = Randomness(3), Randomness(3)
        permuted = draw_permutation(count, drawn, numbers.device)
        assert permuted.tolist() == copy_shuffled(numbers, again).tolist()
        assert permuted.sort().values.tolist() == numbers.tolist()
        assert drawn.bits.state == again.bits.state
    assert permuted.tolist() != numbers.tolist()
