"""AgileRL's names, transitions, samplers and segment trees on our core."""

from __future__ import annotations

import importlib
import operator
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader, TensorDataset

import relive as rl
from relive.compat.agilerl.components import data, replay_buffer, segment_tree
from relive.compat.agilerl.components.data import MultiAgentTransition, ReplayDataset, Transition, to_tensordict
from relive.compat.agilerl.components.replay_buffer import MultiStepReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer
from relive.compat.agilerl.components.sampler import Sampler
from relive.compat.agilerl.components.segment_tree import MinSegmentTree, SegmentTree, SumSegmentTree


def make_rows(count: int, start: int = 0) -> TensorDict:
    number = torch.arange(start, start + count).float()
    step = {"obs": number[:, None], "action": number, "reward": number, "next_obs": number[:, None] + 1}
    return TensorDict({**step, "done": torch.zeros(count)}, batch_size=[count])


class TestTransitions:
    def test_a_transition_is_float32_and_a_lone_number_a_vector(self) -> None:
        step = Transition(obs=np.zeros(3), action=np.int64(2), next_obs=np.ones(3), reward=1, done=False)
        kept = step.to_tensordict()
        assert {key: (tuple(leaf.shape), leaf.dtype) for key, leaf in kept.items() if key in ("reward", "done")} == {
            "reward": ((1,), torch.float32), "done": ((1,), torch.float32),
        }  # fmt: skip
        assert kept["action"].dtype == torch.float32

    def test_dicts_and_tuples_become_tensordicts(self) -> None:
        obs = ({"camera": np.zeros((2, 3))}, (np.zeros((2, 1)), np.ones((2, 4))))
        for given, keys in zip(obs, (["camera"], ["tuple_obs_0", "tuple_obs_1"]), strict=True):
            step = Transition(given, np.zeros(2), given, np.zeros(2), np.zeros(2), batch_size=[2]).to_tensordict()
            assert sorted(step["obs"].keys()) == keys
            memory = ReplayBuffer(4)
            memory.add(step)
            assert sorted(memory.sample(2)["next_obs"].keys()) == keys
        with pytest.raises(TypeError, match="Cannot convert data of type"):
            to_tensordict([1, 2])

    def test_agents_have_parts_of_their_own(self) -> None:
        obs = {"fox": np.zeros((2, 3)), "hare": (np.zeros((2, 1)), np.ones((2, 2)))}
        each = {"fox": np.arange(2.0), "hare": np.arange(2.0) + 5}
        step: Any = MultiAgentTransition(obs=obs, action=each, reward=each, next_obs=obs, done=each).to_tensordict()
        step.batch_size = [2]
        memory = ReplayBuffer(4)
        memory.add(step)
        batch = memory.sample(2)
        assert torch.equal(batch["reward", "hare"], batch["reward", "fox"] + 5)
        assert batch["obs", "hare", "tuple_obs_1"].shape == (2, 2)


def forked_loader(memory: Any, **options: Any) -> DataLoader[Any]:
    """Make a loader of batches of 16 rows with forked workers."""
    dataset, collate = ReplayDataset(memory, batch_size=16), Sampler.tensordict_collate_fn
    return DataLoader(dataset, batch_size=None, multiprocessing_context="fork", collate_fn=collate, **options)


class TestSampler:
    def test_each_kind_of_buffer_is_sampled_its_way(self) -> None:
        plain, by_priority, n_steps = ReplayBuffer(9), PrioritizedReplayBuffer(9), MultiStepReplayBuffer(9, n_step=2)
        for start in range(0, 9, 3):
            oldest = n_steps.add(make_rows(3, start))
            for memory in (plain, by_priority):
                if oldest is not None:
                    memory.add(oldest)
        assert Sampler(plain).sample(4, return_idx=True)["idxs"].shape == (4,)
        batch = Sampler(by_priority).sample(4, 0.4)
        assert batch["weights"].shape == (4, 1)
        after = Sampler(n_steps).sample(batch["idxs"])
        torch.testing.assert_close(after["next_obs"].squeeze(), batch["obs"].squeeze() + 4)
        with pytest.warns(UserWarning, match="^Memory is not an agilerl ReplayBuffer: got int"):
            Sampler(memory=0)
        with pytest.raises(AssertionError, match="^Sampler: expected a memory, or a dataset with its dataloader"):
            Sampler()

    def test_a_loader_gives_batches_of_the_dataset(self) -> None:
        memory = ReplayBuffer(9)
        memory.add(make_rows(9))
        dataset = ReplayDataset(memory, batch_size=2)
        sampler = Sampler(dataset=dataset, dataloader=DataLoader(dataset, batch_size=None))
        assert sampler.distributed
        assert sampler.sample(5)["obs"].shape == (5, 1)
        with pytest.warns(UserWarning, match="Buffer is not an agilerl ReplayBuffer: "):
            data.ReplayDataset(object())

    @pytest.mark.parametrize("kind", [ReplayBuffer, PrioritizedReplayBuffer])
    def test_workers_of_a_loader_draw_by_themselves_from_the_rows_stored_when_they_start(self, kind: Any) -> None:
        memory = kind(64)
        memory.add(make_rows(32))
        loader = forked_loader(memory, num_workers=2)
        first, second = (list(loader) for _ in range(2))
        assert len({tuple(batch["obs"].reshape(-1).tolist()) for batch in (*first, *second)}) == 4
        assert all(batch["obs"].max() < 32 and len(batch) == 16 for batch in (*first, *second))
        memory.add(make_rows(32, start=1_000))
        assert max(float(batch["obs"].max()) for batch in loader) >= 1_000
        assert memory.sample(16).batch_size == (16,)

    def test_a_worker_that_stays_draws_other_rows_each_time(self) -> None:
        memory = ReplayBuffer(64)
        memory.add(make_rows(64))
        loader = forked_loader(memory, num_workers=1, persistent_workers=True)
        drawn = {tuple(batch["obs"].reshape(-1).tolist()) for _ in range(4) for batch in loader}
        assert len(drawn) == 4

    def test_a_dataset_and_a_loader_of_other_kinds_are_told_of(self) -> None:
        class Broken(Sampler):
            def _replace_dataloader_collate_fn(self, dataloader: Any) -> Any:
                return []

        other: Any = TensorDataset(torch.zeros(1))
        other.buffer = ReplayBuffer(9)
        dataset = ReplayDataset(other.buffer)
        with pytest.warns(UserWarning, match="^Dataset is not an agilerl ReplayDataset: got TensorDataset"):
            Sampler(dataset=other, dataloader=DataLoader(other, batch_size=None))
        with pytest.warns(UserWarning, match="^Dataset is not a torch DataLoader object: got list"):
            Broken(dataset=dataset, dataloader=DataLoader(dataset, batch_size=None))


class TestTrees:
    @pytest.mark.parametrize("kind", [SumSegmentTree, MinSegmentTree])
    def test_ranges_are_what_the_leaves_say(self, kind: Any) -> None:
        random = np.random.default_rng(0)
        tree, leaves = kind(16), np.full(16, 0.0 if kind is SumSegmentTree else np.inf)
        reduce = np.add.reduce if kind is SumSegmentTree else np.minimum.reduce
        for _ in range(20):
            index, values = random.integers(16, size=3), random.random(3)
            index = np.unique(index)
            tree.update_batch(index, values[: len(index)])
            leaves[index] = values[: len(index)]
            start, end = sorted(random.choice(17, 2, replace=False))
            assert tree.operate(start, end) == pytest.approx(reduce(leaves[start:end]))
            assert tree.operate() == pytest.approx(reduce(leaves))
        assert [tree[i] for i in range(16)] == leaves.tolist() == tree.get_batch(np.arange(16)).tolist()
        assert tree.tree[1] == pytest.approx(reduce(leaves))

    def test_a_leaf_is_found_by_the_running_sum(self) -> None:
        tree = SumSegmentTree(4)
        for i, value in enumerate((0.5, 0.0, 1.0, 3.0)):
            tree[i] = value
        assert [tree.retrieve(bound) for bound in (0.0, 0.49, 0.5, 1.49, 1.5, 4.5)] == [0, 0, 2, 2, 3, 3]
        with pytest.raises(AssertionError, match="upperbound"):
            tree.retrieve(9.0)
        with pytest.raises(AssertionError, match="power of two"):
            SegmentTree(3, operator.add, 0.0)

    def test_what_is_written_to_a_tree_of_a_buffer_is_a_priority(self) -> None:
        memory = PrioritizedReplayBuffer(6, alpha=0.5, seed=0)
        memory.add(make_rows(6))
        memory.sum_tree[2] = 3.0
        memory.min_tree[4] = 0.25
        assert [memory.sum_tree[i] for i in range(6)] == pytest.approx([1, 1, 3, 1, 0.25, 1])
        assert memory.max_priority == pytest.approx(9)
        memory._update_priority(0, 4.0)
        assert memory.min_tree[0] == pytest.approx(2.0)
        assert memory.sum_tree.sum() == pytest.approx(8.25)


class TestNothingIsLost:
    def test_what_is_written_to_the_storage_is_sampled(self) -> None:
        memory = ReplayBuffer(4)
        memory.add(make_rows(4))
        storage: Any = memory.storage
        storage["reward"] += 10
        storage["obs"] = torch.full((4, 1), 7.0)
        batch = memory.sample(4)
        assert sorted(batch["reward"].squeeze(1).tolist()) == [10, 11, 12, 13]
        assert (batch["obs"] == 7).all()
        assert (batch.device, storage.device) == (torch.device("cpu"), torch.device("cpu"))

    def test_alpha_is_set_before_rows_or_refused(self) -> None:
        memory = PrioritizedReplayBuffer(4)
        memory.alpha = 1.0
        memory.add(make_rows(4))
        memory.update_priorities(torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 4.0]))
        assert memory.sum_tree.sum() == 10
        with pytest.raises(rl.SchemaError, match=r"alpha: expected 1\.0 for the rows that are stored, got 0\.5"):
            memory.alpha = 0.5


def test_classes_are_agilerls_where_it_is_installed_and_plain_elsewhere() -> None:
    try:
        theirs: Any = importlib.import_module("agilerl.components.replay_buffer")
    except ModuleNotFoundError:
        assert {kind.__module__.partition(".")[0] for kind in ReplayBuffer.__mro__} == {"relive", "builtins"}
        return
    for name in ("ReplayBuffer", "MultiStepReplayBuffer", "PrioritizedReplayBuffer"):
        assert issubclass(getattr(replay_buffer, name), getattr(theirs, name))
    trees: Any = importlib.import_module("agilerl.components.segment_tree")
    assert issubclass(segment_tree.SumSegmentTree, trees.SumSegmentTree)
