"""The timeline's numbers against hand-written arithmetic.

The walk pays s + 1 in state s and is cut off after three steps; with γ = 0.5 and λ = 1 the true values are
V(s) = 2 s + 4, that is 4, 6, 8, 10 for the states 0 to 3.
"""

import pytest
import torch
from gymnasium.vector import AutoresetMode
from rich.console import Console

from examples.demo.timeline import GAMMA, LAM, play, play_all, render, true_value

MODES = list(AutoresetMode)


def test_the_true_value_satisfies_its_own_equation() -> None:
    states = torch.arange(4.0).unsqueeze(1)
    assert true_value(states).tolist() == [4, 6, 8, 10]
    assert true_value(states[:3]).tolist() == [s + 1 + GAMMA * (2 * (s + 1) + 4) for s in range(3)]


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_same_transitions_and_zero_advantages_for_an_exact_critic(mode: AutoresetMode) -> None:
    timeline = play(mode)
    real = timeline.mask
    assert timeline.obs[real].tolist() == [0, 1, 2, 0, 1]
    assert timeline.next_obs[real].tolist() == [1, 2, 3, 1, 2]
    assert timeline.reward[real].tolist() == [1, 2, 3, 1, 2]
    assert timeline.truncated[real].tolist() == [False, False, True, False, False]
    assert timeline.value[real].tolist() == [4, 6, 8, 4, 6]
    assert timeline.advantage[real].tolist() == [0, 0, 0, 0, 0]
    assert timeline.return_[real].tolist() == [4, 6, 8, 4, 6]


@pytest.mark.parametrize(
    ("mode", "mask", "returned"),
    [
        (AutoresetMode.NEXT_STEP, [1, 1, 1, 0, 1, 1], [1, 2, 3, 0, 1, 2]),
        (AutoresetMode.SAME_STEP, [1, 1, 1, 1, 1], [1, 2, 0, 1, 2]),
        (AutoresetMode.DISABLED, [1, 1, 1, 1, 1], [1, 2, 3, 1, 2]),
    ],
)
def test_the_modes_differ_in_what_step_returns_and_in_the_reset_row(
    mode: AutoresetMode, mask: list[int], returned: list[int]
) -> None:
    timeline = play(mode)
    assert timeline.mask.tolist() == [bool(m) for m in mask]
    assert timeline.returned.tolist() == returned
    assert timeline.cut == 2


def test_the_naive_loops_compute_wrong_advantages() -> None:
    assert (GAMMA, LAM) == (0.5, 1.0)
    as_end = 3 - 8  # no bootstrap at the truncation
    from_reset = 3 + 0.5 * 4 - 8  # bootstrapped from V(0), the new episode's value
    reset_row = 0 + 0.5 * 4 - 10  # from state 3 to state 0 for nothing, as if it were a step
    assert play(AutoresetMode.NEXT_STEP).naive.tolist() == [as_end / 4, as_end / 2, as_end, reset_row, 0, 0]
    assert play(AutoresetMode.SAME_STEP).naive.tolist() == [from_reset / 4, from_reset / 2, from_reset, 0, 0]
    assert play(AutoresetMode.DISABLED).naive.tolist() == [as_end / 4, as_end / 2, as_end, 0, 0]


def test_the_timeline_fits_80_columns_and_ends_with_the_computed_numbers() -> None:
    console = Console(width=80, record=True, quiet=True)
    lines = console.render_lines(render(play_all()), pad=False)
    text = ["".join(segment.text for segment in line).rstrip() for line in lines]
    assert max(map(len, text)) <= 80
    assert [line.split()[0] for line in text if "naive:" in line] == ["NEXT_STEP", "SAME_STEP", "DISABLED"]
    assert "  2    2       3        3     3  truncated   True       0.00    8.00     -5.00 ✗" in text
    assert "  2    2       3        0     3  truncated   True       0.00    8.00     -3.00 ✗" in text
    assert "       3       0        0     -    (reset)  False          -       -     -8.00 ✗" in text
    conclusion = " ".join(" ".join(text).split())
    assert "3 + 0.5 * V(3) - V(2) = 3 + 0.5 * 10 - 8 = 0, and relive computes the same in all modes" in conclusion
    assert "the naive loops compute -3 and -5, blame the steps before it too, and one learns -8" in conclusion
