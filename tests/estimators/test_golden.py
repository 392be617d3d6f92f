"""Cases worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from relive import estimators as rl

pytestmark = pytest.mark.usefixtures("backend")


def floats(*values: float) -> Tensor:
    return torch.tensor(values)


def flags(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


def test_an_end_is_read_at_the_step_that_ended() -> None:
    reward, value, next_value = floats(1, 1, 1), floats(0, 0, 10), floats(0, 10, 0)
    _, return_ = rl.gae(reward, value, next_value, flags(0, 1, 0), flags(0, 0, 0), gamma=1.0, lam=1.0)
    assert return_.tolist() == [2, 1, 1]


def test_a_truncated_step_bootstraps_from_its_final_value_and_cuts_the_chain() -> None:
    reward, value, next_value = floats(1, 1, 1), floats(0, 0, 10), floats(0, 5, 0)
    advantage, return_ = rl.gae(reward, value, next_value, flags(0, 0, 0), flags(0, 1, 0), gamma=1.0, lam=1.0)
    assert return_.tolist() == [7, 6, 1]
    assert advantage.tolist() == [7, 6, -9]


def test_a_step_that_is_terminated_and_truncated_counts_as_terminated() -> None:
    reward, value, next_value = floats(1, 1, 1), floats(0, 0, 10), floats(0, 5, 0)
    _, return_ = rl.gae(reward, value, next_value, flags(0, 1, 0), flags(0, 1, 0), gamma=1.0, lam=1.0)
    assert return_.tolist() == [2, 1, 1]


def test_gae_with_an_end_inside_has_the_numbers_of_the_design() -> None:
    reward, value, next_value = floats(10, 0, 0, 100, 0), floats(1, 2, 3, 4, 5), floats(2, 3, 4, 5, 0)
    terminated, truncated = flags(0, 0, 1, 0, 0), flags(0, 0, 0, 0, 0)
    advantage, return_ = rl.gae(reward, value, next_value, terminated, truncated, gamma=0.9, lam=0.8)
    torch.testing.assert_close(advantage, floats(9.7488, -1.46, -3, 96.9, -5))
    torch.testing.assert_close(return_, floats(10.7488, 0.54, 0, 100.9, 0))


def test_group_advantage_has_the_numbers_of_the_design() -> None:
    reward = torch.tensor([[1.0, 1, 1], [1, 0, 2]]).T
    done = torch.tensor([[0, 1, 0], [0, 0, 0]], dtype=torch.bool).T
    seq_return, seq_mask, advantage = rl.group_advantage(reward, done, group_size=2, gamma=0.9)
    torch.testing.assert_close(seq_return.T, torch.tensor([[1.9, 1, 1], [2.62, 1.8, 2]]))
    assert seq_mask.T.tolist() == [[True, True, False], [True, True, True]]
    torch.testing.assert_close(advantage.T, torch.tensor([[-1.0, -1, 0], [1, 1, 0]]))


def test_group_advantage_counts_later_episodes_when_asked() -> None:
    reward = torch.tensor([[1.0, 1, 1], [1, 0, 2]]).T
    done = torch.tensor([[0, 1, 0], [0, 0, 0]], dtype=torch.bool).T
    _, seq_mask, advantage = rl.group_advantage(reward, done, group_size=2, gamma=0.9, first_episode_only=False)
    assert bool(seq_mask.all())
    torch.testing.assert_close(advantage.T, torch.tensor([[-1.0, -1, -1], [1, 1, 1]]))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_n_step_windows_stop_at_an_end_at_a_truncation_and_at_the_last_row(n: int) -> None:
    # Reward t + 1, next value 100 (t + 1), γ = ½: rows 0–1 end by termination, 2–4 by truncation, 5 is unfinished.
    reward, next_value = floats(1, 2, 3, 4, 5, 6), floats(100, 200, 300, 400, 500, 600)
    got = rl.n_step_return(reward, next_value, flags(0, 1, 0, 0, 0, 0), flags(0, 0, 0, 0, 1, 0), gamma=0.5, n=n)
    expected = {
        1: [1 + 50, 2, 3 + 150, 4 + 200, 5 + 250, 6 + 300],
        2: [1 + 1, 2, 3 + 2 + 100, 4 + 2.5 + 125, 5 + 250, 6 + 300],
        3: [1 + 1, 2, 3 + 2 + 1.25 + 62.5, 4 + 2.5 + 125, 5 + 250, 6 + 300],
    }
    assert got.tolist() == expected[n]


def test_monte_carlo_bootstraps_the_unfinished_last_row_from_last_value() -> None:
    reward, none = torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    terminated, truncated = none.clone(), none.clone()
    terminated[1, 1] = truncated[1, 2] = True
    last_value = floats(8, 8, 8)
    assert rl.discounted_return(reward, none, none, gamma=0.5).tolist() == [[1.5] * 3, [1] * 3]
    got = rl.discounted_return(reward, terminated, truncated, gamma=0.5, last_value=last_value)
    assert got.tolist() == [[3.5, 1.5, 1.5], [5, 1, 1]]
    next_value = torch.full((2, 3), 4.0)
    got = rl.discounted_return(reward, terminated, truncated, gamma=0.5, next_value=next_value)
    assert got.tolist() == [[2.5, 1.5, 2.5], [3, 1, 3]]
    got = rl.discounted_return(reward, terminated, truncated, gamma=0.5, next_value=next_value, last_value=last_value)
    assert got.tolist() == [[3.5, 1.5, 2.5], [5, 1, 3]]


def test_monte_carlo_of_one_environment_takes_its_last_value_as_a_number() -> None:
    assert rl.discounted_return(floats(1, 1), flags(0, 0), flags(0, 0), gamma=0.5, last_value=8).tolist() == [3.5, 5]


def test_normalize_is_what_torch_says_about_the_counted_entries() -> None:
    x, mask = torch.tensor([[1.0, 2, 50], [4, torch.nan, 6]]), torch.tensor([[1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    counted = x[mask]
    got = rl.normalize(x, mask)
    torch.testing.assert_close(got[mask], (counted - counted.mean()) / (counted.std() + 1e-8))
    assert got[~mask].tolist() == [0, 0]
    torch.testing.assert_close(rl.normalize(counted), got[mask])


def test_normalize_of_equal_entries_or_of_one_entry_is_zero() -> None:
    assert rl.normalize(torch.full((7,), 0.1)).tolist() == [0] * 7
    assert rl.normalize(torch.tensor([3.0])).tolist() == [0]
    assert rl.normalize(torch.tensor([3.0, 5]), torch.tensor([False, False])).tolist() == [0, 0]


def test_normalize_by_the_deviation_of_the_population() -> None:
    x = torch.tensor([1.0, 2, 3, 10])
    got = rl.normalize(x, correction=0)
    torch.testing.assert_close(got, (x - x.mean()) / x.std(correction=0))
    assert rl.normalize(torch.tensor([3.0]), correction=0).tolist() == [0]


def test_normalize_adds_eps_to_the_deviation() -> None:
    torch.testing.assert_close(rl.normalize(floats(1, 3), eps=1.0), floats(-1, 1) / (2**0.5 + 1))


def test_explained_variance_is_one_for_the_truth_and_zero_for_a_constant() -> None:
    return_ = torch.tensor([[1.0, 2], [3, 7]])
    assert rl.explained_variance(return_, return_).item() == 1
    assert rl.explained_variance(return_ + 5, return_).item() == 1
    assert rl.explained_variance(torch.zeros(2, 2), return_).item() == 0
    assert rl.explained_variance(-return_, return_).item() == -3
    assert rl.explained_variance(return_, return_).shape == ()


def test_explained_variance_of_constant_returns_is_nan() -> None:
    assert rl.explained_variance(torch.randn(7), torch.full((7,), 0.1)).isnan()


def test_explained_variance_does_not_read_masked_entries() -> None:
    value, return_ = floats(1, 2, torch.nan, 4), floats(2, 2, 5, torch.inf)
    mask = flags(1, 1, 0, 0)
    # The returns outside the mask are constant, so no variance can be explained.
    assert rl.explained_variance(value, return_, mask=mask).isnan()
    mask, return_ = flags(1, 1, 0, 0), floats(2, 4, 5, torch.inf)
    assert rl.explained_variance(value, return_, mask=mask).item() == 1 - 0.25


@pytest.mark.parametrize("reward", [0.1, 1234.567, 1e-6])
@pytest.mark.parametrize("group_size", [2, 7, 8])
def test_groups_of_equal_returns_have_no_advantage(reward: float, group_size: int) -> None:
    rewards = torch.full((50, 2 * group_size), reward)
    done = torch.zeros(rewards.shape, dtype=torch.bool)
    done[-1] = True
    assert not rl.group_advantage(rewards, done, group_size=group_size, gamma=0.99)[2].any()
