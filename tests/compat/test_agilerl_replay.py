"""AgileRL's replay buffers on our core: their behaviour and our corrections."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

import relive as rl
from relive.compat.agilerl import MultiStepReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer
from tests.reference import agilerl as reference


def make_steps(start: int, count: int, done: Any = False) -> TensorDict:
    """Make transitions i from `start` on: observation (i, −i), action i, reward 10·i, next observation i + 0.5."""
    number = torch.arange(start, start + count).float()
    ended = torch.as_tensor(done).float().expand(count).clone()
    return TensorDict(
        {
            "obs": torch.stack([number, -number], 1),
            "action": number.long(),
            "reward": number * 10,
            "next_obs": torch.stack([number + 0.5, -number], 1),
            "done": ended,
        },
        batch_size=[count],
    )


@pytest.mark.parametrize("kind", [ReplayBuffer, PrioritizedReplayBuffer])
@pytest.mark.parametrize("count", [torch.tensor(2), np.int64(2)])
def test_a_count_may_be_a_number_of_torch_or_numpy(kind: Any, count: Any) -> None:
    memory = kind(8)
    memory.add(make_steps(0, 5))
    assert len(memory.sample(count)) == 2


def list_transition_numbers(batch: TensorDict) -> list[int]:
    """Return the numbers of a batch's transitions, and check that the fields of each agree."""
    actual = batch["obs"][:, 0]
    assert torch.equal(batch["action"][:, 0].float(), actual)
    assert torch.equal(batch["reward"][:, 0], actual * 10)
    assert torch.equal(batch["next_obs"][:, 0], actual + 0.5)
    return [int(number) for number in actual]


def test_the_first_rows_shape_the_buffer_and_numbers_become_columns() -> None:
    memory = ReplayBuffer(5)
    assert (memory.storage, memory.initialized, memory.size) == (None, False, 0)
    assert memory.add(make_steps(0, 3)) is None
    assert memory.storage is not None
    assert {key: tuple(leaf.shape) for key, leaf in memory.storage.items()} == {
        "obs": (5, 2), "action": (5, 1), "reward": (5, 1), "next_obs": (5, 2), "done": (5, 1),
    }  # fmt: skip
    assert memory.storage["action"].dtype == torch.int64
    assert memory.storage["obs"][:, 0].tolist() == [0, 1, 2, 0, 0]
    assert (memory.size, len(memory), memory.counter, memory.is_full) == (3, 3, 3, False)


@pytest.mark.parametrize("chunks", [[1] * 12, [4, 4, 4], [7, 5], [12]], ids=str)
def test_the_newest_rows_stay_however_they_came(chunks: list[int]) -> None:
    memory, start = ReplayBuffer(5), 0
    for count in chunks:
        memory.add(make_steps(start, count))
        start += count
    assert memory.is_full
    assert memory.counter == 12
    assert sorted(list_transition_numbers(memory.sample(5))) == [7, 8, 9, 10, 11]


def test_a_batch_has_no_row_twice_and_no_more_rows_than_there_are() -> None:
    memory = ReplayBuffer(100)
    memory.add(make_steps(0, 60))
    drawn = [list_transition_numbers(memory.sample(50)) for _ in range(2)]
    assert [len(set(batch)) for batch in drawn] == [50, 50]
    assert drawn[0] != drawn[1]
    assert sorted(list_transition_numbers(memory.sample(64))) == list(range(60))


def test_a_large_buffer_is_drawn_with_replacement_from_all_of_it() -> None:
    memory = ReplayBuffer(16_400)
    memory.add(make_steps(0, 16_400))
    drawn = list_transition_numbers(memory.sample(16_400))
    # A draw with replacement has 1 − 1/e of all rows.
    assert 0.6 < len(set(drawn)) / 16_400 < 0.67
    assert min(drawn) < 100
    assert max(drawn) > 16_300


def test_indices_name_rows_for_ever() -> None:
    memory = ReplayBuffer(3)
    memory.add(make_steps(0, 5))
    batch = memory.sample(3, return_idx=True)
    assert batch["idxs"].tolist() == list_transition_numbers(batch)
    assert "idxs" not in memory.sample(3).keys()


def test_any_names_and_nesting_are_rows() -> None:
    memory = ReplayBuffer(4)
    obs = TensorDict({"camera": torch.arange(6).view(3, 2, 1).to(torch.uint8), "speed": torch.arange(3.0)}, [3])
    memory.add(TensorDict({"obs": obs, "index": torch.arange(3)}, [3]))
    batch = memory.sample(3)
    assert batch["obs", "camera"].dtype == torch.uint8
    assert batch["obs", "speed"].shape == (3, 1)
    assert torch.equal(batch["obs", "camera"][:, 1, 0].float(), 2 * batch["obs", "speed"][:, 0] + 1)
    assert torch.equal(batch["index"], batch["obs", "speed"].long())


def test_what_is_added_and_what_is_sampled_are_copies() -> None:
    for memory in (ReplayBuffer(4), MultiStepReplayBuffer(4, n_step=1), PrioritizedReplayBuffer(4)):
        # `to` returns a TensorDict that has a device already itself, not a copy.
        given_ = make_steps(0, 3).to("cpu")
        returned = memory.add(given_)
        assert given_["action"].shape == (3,)
        given_["obs"].zero_()
        memory.sample(3)["obs"].zero_()
        assert set(list_transition_numbers(memory.sample(100))) == {0, 1, 2}
        assert returned is None or returned["obs"][:, 0].tolist() == [0, 1, 2]


def test_clear_forgets_rows_and_fields_but_not_the_counter() -> None:
    memory = ReplayBuffer(4)
    memory.clear()
    memory.add(make_steps(0, 4))
    stale = memory.sample(4, return_idx=True)["idxs"]
    memory.clear()
    assert (memory.size, memory.initialized, memory.storage, memory.counter) == (0, False, None, 4)
    memory.add(make_steps(6, 2))
    batch = memory.sample(4, return_idx=True)
    assert sorted(list_transition_numbers(batch)) == [6, 7]
    assert not set(stale.tolist()) & set(batch["idxs"].tolist())
    memory.clear()
    memory.add(TensorDict({"context": torch.ones(1, 3)}, [1]))
    assert memory.sample(1)["context"].tolist() == [[1, 1, 1]]


def test_sampling_from_nothing_and_adding_what_is_no_batch_are_refused() -> None:
    memory = ReplayBuffer(4)
    with pytest.raises(AssertionError, match="sample: expected stored rows"):
        memory.sample(1)
    with pytest.raises(rl.SchemaError, match="add: expected a TensorDict of batch size"):
        memory.add(TensorDict({"obs": torch.zeros(2)}, []))
    with pytest.raises(rl.SchemaError, match="extend: expected at least one step"):
        memory.add(make_steps(0, 0))
    with pytest.raises(AssertionError, match="sample: expected stored rows"):
        memory.sample(1)
    memory.add(make_steps(0, 2))
    with pytest.raises(rl.SchemaError, match="expected the keys"):
        memory.add(make_steps(2, 2).exclude("done"))
    assert len(memory.sample(0)) == 0
    assert sorted(list_transition_numbers(memory.sample(4))) == [0, 1]
    memory.clear()
    with pytest.raises(AssertionError, match="sample: expected stored rows"):
        memory.sample(1)


def test_the_attributes_say_where_rows_are() -> None:
    memory = ReplayBuffer(3)
    assert (memory._cursor, memory._size, memory._storage) == (0, 0, None)
    memory.add(make_steps(0, 2))
    assert (memory._cursor, memory._size) == (2, 2)
    memory.add(make_steps(2, 2))
    assert (memory._cursor, memory._size, memory.is_full) == (1, 3, True)
    assert memory._storage is not None
    assert memory._storage["obs"][:, 0].tolist() == [3, 1, 2]
    memory.clear()
    assert (memory._cursor, memory._size, memory._storage) == (0, 0, None)
    memory.add(make_steps(7, 1))
    assert memory.storage is not None
    assert memory.storage[: memory.size]["obs"][:, 0].tolist() == [7]


@pytest.mark.parametrize("kind", [ReplayBuffer, PrioritizedReplayBuffer])
def test_the_size_says_how_many_rows_of_the_memory_are_stored(kind: Any) -> None:
    memory = kind(5)
    memory.add(make_steps(0, 4))
    stale = memory.sample(100, return_idx=True)["idxs"]
    memory.size = 2
    assert (memory.size, memory.counter, memory._cursor) == (2, 4, 2)
    assert set(list_transition_numbers(memory.sample(50))) == {0, 1}
    assert not set(stale.flatten().tolist()) & set(memory.sample(50, return_idx=True)["idxs"].flatten().tolist())
    memory.storage["obs"][2] = torch.tensor([9.0, 9.0])
    memory.size = 3
    assert set(memory.sample(50)["obs"][:, 0].tolist()) == {0, 1, 9}
    for wrong in (-1, 6):
        with pytest.raises(ValueError, match=f"size: expected 0 to 5, got {wrong}"):
            memory.size = wrong
    memory.size = 0
    assert (len(memory), memory.counter, memory.initialized, memory._cursor) == (0, 4, True, 0)
    assert memory.storage["obs"][:3, 0].tolist() == [0, 1, 9]
    memory.size = 2
    assert set(memory.sample(50)["obs"][:, 0].tolist()) == {0, 1}
    memory.size = 0
    memory.add(make_steps(7, 1))
    assert list_transition_numbers(memory.sample(1)) == [7]
    assert len(memory) == 1


def test_a_subclass_may_keep_its_rows_itself() -> None:
    class Listed(PrioritizedReplayBuffer):
        def __init__(self) -> None:
            super().__init__(max_size=0)
            self.rows: list[Any] = []

        def add(self, data: TensorDict) -> None:
            self.rows.append(data)
            self.size += 1

    memory = Listed()
    memory.add(make_steps(0, 1))
    memory.add(make_steps(1, 1))
    assert (memory.size, len(memory), len(memory.rows)) == (2, 2, 2)
    memory.clear()
    assert len(memory) == 0
    with pytest.raises(ValueError, match="capacity: expected a positive int, got 0"):
        ReplayBuffer(0).add(make_steps(0, 1))


def make_walk(done: torch.Tensor) -> list[TensorDict]:
    """Make T steps of N environments; the reward of step t is 10^t, so that a sum shows its steps."""
    time, envs = done.shape
    made = []
    for t in range(time):
        place = torch.arange(envs) + 100.0 * t
        row = {"obs": place, "action": place, "reward": torch.full((envs,), 10.0**t), "next_obs": place + 0.5}
        made.append(TensorDict({**row, "done": done[t].float()}, [envs]))
    return made


@pytest.mark.parametrize(
    ("ends", "reward", "after", "done"),
    [([], 111, 200.5, 0), ([0], 1, 0.5, 1), ([1], 11, 100.5, 1), ([2], 111, 200.5, 1), ([0, 2], 1, 0.5, 1)],
    ids=str,
)
def test_n_steps_stop_at_the_first_end(ends: list[int], reward: float, after: float, done: float) -> None:
    flags = torch.zeros(3, 1, dtype=torch.bool)
    flags[ends] = True
    memory = MultiStepReplayBuffer(10, n_step=3, gamma=1.0)
    returned = [memory.add(step) for step in make_walk(flags)]
    assert returned[:2] == [None, None]
    assert returned[2] is not None
    assert returned[2]["reward"].tolist() == [1]
    assert returned[2]["next_obs"].tolist() == [0.5]
    row = memory.sample(1)
    assert [row[key].item() for key in ("obs", "reward", "next_obs", "done")] == [0, reward, after, done]


def _read_numbers(row: Any) -> dict[str, float]:
    return {key: value.item() for key, value in row.items()}


@given(st.data())
def test_n_steps_match_the_written_out_windows_of_each_environment(data: st.DataObject) -> None:
    n, envs, time = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 7))
    done = torch.tensor(data.draw(st.lists(st.booleans(), min_size=time * envs, max_size=time * envs))).view(time, envs)
    gamma = data.draw(st.sampled_from([0.5, 1.0]))
    memory, one_step = MultiStepReplayBuffer(50, n_step=n, gamma=gamma), ReplayBuffer(50)
    raw = make_walk(done)
    for step in raw:
        oldest = memory.add(step)
        if oldest is not None:
            one_step.add(oldest)
    expected = []
    for env in range(envs):
        of_env = [_read_numbers(step[env]) for step in raw]
        expected += reference.n_steps(of_env, n, gamma)
    assert memory.size == one_step.size == len(expected)
    if expected:
        drawn = one_step.sample(50, return_idx=True)
        fused = memory.sample_from_indices(drawn["idxs"])
        assert torch.equal(fused["obs"], drawn["obs"])
        actual = [_read_numbers(fused[i]) for i in range(len(fused))]
        assert sorted(actual, key=lambda row: row["obs"]) == sorted(expected, key=lambda row: row["obs"])


def test_nested_next_observations_go_with_the_end_of_the_window() -> None:
    memory = MultiStepReplayBuffer(4, n_step=2, gamma=1.0)
    for t in range(2):
        obs = TensorDict({"a": torch.tensor([[t, t]]), "b": TensorDict({"c": torch.tensor([[t]])}, [1])}, [1])
        after = TensorDict({"a": obs["a"] + 7, "b": TensorDict({"c": obs["b", "c"] + 7}, [1])}, [1])
        row = {"obs": obs, "next_obs": after, "reward": torch.ones(1, 1), "terminated": torch.zeros(1, 1)}
        memory.add(TensorDict(row, [1]))
    assert memory.done_key == "terminated"
    assert memory.sample(1)["next_obs", "b", "c"].item() == 8
    assert memory.sample(1)["reward"].tolist() == [[2]]


def test_indices_of_any_shape_give_rows_of_that_shape() -> None:
    memory = MultiStepReplayBuffer(4, n_step=1)
    memory.add(make_steps(0, 3))
    rows = memory.sample_from_indices(torch.tensor([[2], [0]]))
    assert rows.batch_size == (2, 1)
    assert rows["obs"][:, 0, 0].tolist() == [2, 0]
    memory.add(make_steps(3, 3))
    with pytest.raises(IndexError, match="1, which was overwritten"):
        memory.sample_from_indices(torch.tensor([1]))


def test_clear_empties_the_window_too() -> None:
    memory = MultiStepReplayBuffer(4, n_step=2, gamma=1.0)
    first, second, third = make_walk(torch.zeros(3, 1, dtype=torch.bool))
    memory.add(first)
    memory.clear()
    assert memory.add(second) is None
    memory.add(third)
    assert memory.sample(4)["reward"].tolist() == [[110]]


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("reward", "add: expected 'reward', 'next_obs' and one of"),
        ("next_obs", "add: expected 'reward', 'next_obs' and one of"),
        ("done", "one of .'done', 'termination', 'terminated'"),
    ],
)
def test_a_step_without_what_n_steps_need_is_refused(missing: str, message: str) -> None:
    memory = MultiStepReplayBuffer(4, n_step=2)
    with pytest.raises(AssertionError, match=message):
        memory.add(make_steps(0, 2).exclude(missing))
    assert not memory.n_step_buffer
    memory.add(make_steps(0, 2))
    with pytest.raises(rl.SchemaError, match="add: expected batch size and fields"):
        memory.add(make_steps(0, 3))
    with pytest.raises(AssertionError, match="sample: expected stored rows"):
        memory.sample_from_indices(torch.tensor([0]))


@pytest.mark.parametrize("n_step", [1, 3])
def test_a_step_unlike_the_one_before_changes_nothing(n_step: int) -> None:
    memory = MultiStepReplayBuffer(9, n_step=n_step)
    for t in range(2):
        memory.add(make_steps(t, 2))
    before, size = [step["obs"].tolist() for step in memory.n_step_buffer], len(memory)
    other = make_steps(2, 2)
    other["done"] = torch.zeros(2, 3)
    for wrong in (
        make_steps(2, 2).exclude("action"),
        make_steps(2, 2).exclude("done"),
        other,
        make_steps(2, 2).set("more", other),
    ):
        with pytest.raises(rl.SchemaError, match="as before"):
            memory.add(wrong)
        assert ([step["obs"].tolist() for step in memory.n_step_buffer], len(memory)) == (before, size)


def test_integer_rewards_are_not_cut() -> None:
    memory = MultiStepReplayBuffer(4, n_step=2, gamma=0.5)
    for t in range(2):
        memory.add(make_steps(t, 1).set("reward", torch.tensor([1])))
    assert memory.sample(1)["reward"].tolist() == [[1.5]]


def test_rows_are_drawn_by_their_priority_to_the_power_of_alpha() -> None:
    memory = PrioritizedReplayBuffer(8, alpha=0.5)
    memory.add(make_steps(0, 3))
    memory.update_priorities(torch.tensor([[0], [1], [2]]), torch.tensor([1.0, 4.0, 16.0]))
    batch = memory.sample(70_000, beta=1.0)
    assert batch["weights"].shape == batch["idxs"].shape == (70_000, 1)
    counts = torch.bincount(torch.tensor(list_transition_numbers(batch)), minlength=3) / 70_000
    assert counts.tolist() == pytest.approx([1 / 7, 2 / 7, 4 / 7], abs=0.01)
    # The weight is (p · 3)^-1, divided by the weight for p = 1/7, the largest.
    expected = torch.tensor([1, 1 / 2, 1 / 4])[batch["idxs"][:, 0]]
    assert torch.allclose(batch["weights"][:, 0], expected)
    assert torch.allclose(memory.sample(9, beta=0.0)["weights"], torch.ones(9, 1))
    # Weights are relative to the largest weight of all rows, not of the batch.
    alone = [memory.sample(1, beta=1.0)["weights"].item() for _ in range(100)]
    assert sorted(set(alone)) == pytest.approx([1 / 4, 1 / 2, 1])


def test_new_rows_have_the_largest_priority_given_so_far() -> None:
    memory = PrioritizedReplayBuffer(4, alpha=1.0)
    memory.add(make_steps(0, 1))
    memory.update_priorities([0], [9.0])
    memory.update_priorities([0], [1.0])
    assert memory.max_priority == 9
    memory.add(make_steps(1, 1))
    drawn = list_transition_numbers(memory.sample(10_000))
    assert sum(drawn) / 10_000 == pytest.approx(0.9, abs=0.02)


def test_a_zero_priority_is_raised_and_no_indices_are_no_update() -> None:
    memory = PrioritizedReplayBuffer(4, alpha=1.0)
    memory.add(make_steps(0, 2))
    memory.update_priorities(torch.tensor([], dtype=torch.int64), torch.tensor([]))
    memory.update_priorities(torch.tensor([0, 1]), torch.tensor([0.0, 1e-5]))
    batch = memory.sample(50, beta=1.0)
    assert torch.equal(batch["weights"], torch.ones(50, 1))
    assert set(list_transition_numbers(batch)) == {0, 1}
    with pytest.raises(rl.PriorityError, match="nan"):
        memory.update_priorities(torch.tensor([0]), torch.tensor([float("nan")]))


def test_the_trees_show_priorities_to_the_power_of_alpha() -> None:
    memory = PrioritizedReplayBuffer(4, alpha=0.6)
    assert (memory.tree_ptr, memory.max_priority, memory.sum_tree.sum(), memory.min_tree.min()) == (0, 1, 0, math.inf)
    memory.add(make_steps(0, 3))
    assert memory.tree_ptr == 3
    memory.update_priorities(np.arange(2), torch.tensor([2.0, 3.0]))
    assert [memory.sum_tree[i] for i in range(4)] == [2.0**0.6, 3.0**0.6, 1.0, 0.0]
    assert [memory.min_tree[i] for i in range(4)] == [2.0**0.6, 3.0**0.6, 1.0, math.inf]
    assert memory.sum_tree.sum() == pytest.approx(2.0**0.6 + 3.0**0.6 + 1)
    assert (memory.min_tree.min(), memory.min_tree.min(0, 2), memory.sum_tree.sum(1, 2)) == (1.0, 2.0**0.6, 3.0**0.6)
    memory.add(make_steps(3, 2))
    assert memory.tree_ptr == 1
    assert memory.sum_tree[0] == memory.sum_tree[3] == memory.max_priority**memory.alpha == 3.0**0.6


def test_the_largest_priority_is_one_that_a_stored_row_was_given() -> None:
    memory = PrioritizedReplayBuffer(2, alpha=1.0)
    memory.add(make_steps(0, 3))
    # Row 0 is overwritten.
    memory.update_priorities([0], [100.0])
    with pytest.raises(ValueError, match="priorities: expected 2 numbers, got 1"):
        memory.update_priorities([1, 2], [100.0])
    assert memory.max_priority == 1
    memory.update_priorities([1], [0.5])
    assert memory.max_priority == 1
    stale = memory.sample(9)["idxs"]
    memory.clear()
    memory.add(make_steps(3, 2))
    memory.update_priorities(stale, torch.full((9,), 100.0))
    assert (memory.max_priority, memory.sum_tree.sum()) == (1, 2)


def test_clear_forgets_priorities() -> None:
    memory = PrioritizedReplayBuffer(8, alpha=1.0)
    memory.add(make_steps(0, 8))
    memory.update_priorities(torch.arange(8), torch.full((8,), 100.0))
    memory.clear()
    assert memory.max_priority == 1
    memory.add(make_steps(8, 1))
    memory.update_priorities(torch.tensor([8]), torch.tensor([1.0]))
    memory.add(make_steps(9, 1))
    drawn = list_transition_numbers(memory.sample(10_000))
    assert set(drawn) == {8, 9}
    assert drawn.count(9) / 10_000 == pytest.approx(0.5, abs=0.03)


def test_n_step_and_prioritized_rows_go_together_by_their_indices() -> None:
    memory, n_step = PrioritizedReplayBuffer(6), MultiStepReplayBuffer(6, n_step=3, gamma=1.0)
    for step in make_walk(torch.zeros(7, 2, dtype=torch.bool)):
        one = n_step.add(step)
        if one is not None:
            memory.add(one)
    batch = memory.sample(20, beta=0.5)
    fused = n_step.sample_from_indices(batch["idxs"]).view(-1)
    assert torch.equal(fused["obs"], batch["obs"])
    assert torch.equal(fused["reward"], batch["reward"] * 111)


@pytest.mark.parametrize("max_size", [None, (), {}, -1])
def test_a_size_that_is_no_positive_int_is_refused(max_size: Any) -> None:
    with pytest.raises(rl.SchemaError, match="max_size"):
        ReplayBuffer(max_size)
