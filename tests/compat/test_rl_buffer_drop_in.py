"""rl-buffer's classes as replacements: copies, writes to attributes, dicts, sequences, shared buffers."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import threading
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import relive as rl
from relive.compat.rl_buffer import (
    BaseBuffer,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    ResetStrategy,
    RolloutBuffer,
    SequenceBatch,
    SharedBaseBuffer,
    SharedReplayBuffer,
    StatsTracker,
)
from tests.faults.processes import CONTEXT

N = 2
COPIES = [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]


def make_transition(t: int, obs: Any = None) -> dict[str, Any]:
    seen = torch.full((N, 3), float(t)) if obs is None else obs
    following = seen + 1 if obs is None else TensorDict(obs, [N]) + 1
    flags = {"done": torch.tensor([t % 3 == 2, False]), "truncated": torch.zeros(N, dtype=torch.bool)}
    rest = {"action": torch.zeros(N, 1), "reward": torch.tensor([t, 10.0 + t])}
    return {"obs": seen, **rest, **flags, "next_obs": following}


def make_step(t: int, **changed: Any) -> dict[str, Any]:
    given = {name: value for name, value in make_transition(t).items() if name not in ("truncated", "next_obs")}
    return {**given, "value": torch.ones(N), "log_prob": torch.zeros(N), **changed}


def make_rollout(steps: int, **options: Any) -> RolloutBuffer:
    buffer = RolloutBuffer(4, N, (3,), (1,), StatsTracker(N), seed=0, **options)
    for t in range(steps):
        buffer.add(**make_step(t))
    return buffer


class TestWrites:
    def test_finished_episodes_can_be_cleared_and_changed(self) -> None:
        tracker = StatsTracker(N)
        tracker.update([1, 1], np.ones(N))
        tracker.ep_info_buffer[0]["ep_rewards"] = 5.0
        assert tracker.get_statistics()["Rollout/rewards_mean"] == 3.0
        tracker.ep_info_buffer.clear()
        assert (tracker.trajectory_num, tracker.get_statistics()) == (0, {})
        tracker.update([0, 0], np.ones(N))
        tracker._current_episode_stats["rewards"] += 10
        tracker.update([1, 0], np.ones(N))
        assert tracker.ep_info_buffer[0] == {"ep_lengths": 2.0, "ep_rewards": 12.0}

    def test_a_number_in_infos_is_that_of_every_environment(self) -> None:
        tracker = StatsTracker(N, extra_metrics_keys=["score"])
        tracker.update([0, 0], 2.0, {"score": 3})
        tracker.update(np.array([[True], [False]]), np.array([1.0]), {"score": torch.tensor([[4.0]])})
        assert tracker.ep_info_buffer[0] == {"ep_lengths": 2.0, "ep_rewards": 3.0, "ep_score": 7.0}
        with pytest.raises(rl.SchemaError, match="dones: expected 2 flags"):
            tracker.update([0, 0, 1], np.ones(N))
        assert tracker._current_episode_stats["lengths"].tolist() == [0.0, 2.0]

    def test_alpha_and_epsilon_may_be_set_later(self) -> None:
        buffer = PrioritizedReplayBuffer(4, N, (3,), (1,), StatsTracker(N), alpha=1.0, epsilon=0.0)
        buffer.add(**make_transition(0))
        buffer.update_priorities([0, 1], [4.0, 1.0])
        assert buffer.sum_tree.total_priority == 5.0
        buffer.alpha, buffer.epsilon = 0.5, 9.0
        buffer.update_priorities(np.array([0]), np.array([-7.0]))
        assert buffer.sum_tree.tree[7:9].tolist() == [4.0, 1.0]
        assert buffer._max_priority == 4.0
        with pytest.raises(TypeError, match="that of a buffer"):
            buffer.sum_tree.add(1.0)
        with pytest.raises(IndexError, match="the leaf of a stored row"):
            buffer.sum_tree.update(5, 1.0)
        with pytest.raises(rl.SchemaError, match="alpha"):
            PrioritizedReplayBuffer(4, N, (3,), (1,), StatsTracker(N), alpha=-1.0)

    def test_memory_that_is_written_is_drawn(self) -> None:
        buffer = ReplayBuffer(4, N, (3,), (1,), StatsTracker(N))
        buffer.add(**make_transition(1))
        buffer._rewards *= 2
        assert set(buffer.get(2).rewards.tolist()) <= {2.0, 22.0}
        with pytest.raises(TypeError, match="add_context"), buffer.add_context(torch.zeros(N), torch.zeros(N)):
            pass
        steps = make_rollout(3)
        steps._rewards.zero_()
        steps._dones[1, 0] = True
        steps.compute_returns_and_advantages(torch.ones(N), torch.zeros(N))
        assert steps.core["terminated"].sum() == 2
        assert torch.equal(steps._returns, steps.core["return"])

    @pytest.mark.parametrize("kind", [ReplayBuffer, PrioritizedReplayBuffer])
    def test_a_position_of_zero_forgets_every_step(self, kind: Any) -> None:
        buffer = kind(4, N, (3,), (1,), StatsTracker(N))
        for t in range(6):
            buffer.add(**make_transition(t))
        with pytest.raises(AttributeError, match="_pos: expected 0, which forgets every step, got 3"):
            buffer._pos = 3
        buffer._pos, buffer._full = 0, False
        assert (len(buffer), len(buffer.core)) == (0, 0)
        with pytest.raises(ValueError, match="empty buffer"):
            buffer.get(1)
        with pytest.raises(AttributeError, match="_full: expected False"):
            buffer._full = True
        buffer.add(**make_transition(9))
        assert set(buffer.get(2).rewards.tolist()) <= {9.0, 19.0}

    def test_episodes_that_a_user_appends_may_lack_metrics(self) -> None:
        tracker = StatsTracker(N)
        tracker.ep_info_buffer.append({"ep_rewards": 3.0})
        assert tracker.get_statistics()["Rollout/step_rewards_mean"] == 3.0
        tracker.ep_info_buffer[0]["ep_lengths"] = 0.0
        assert tracker.get_statistics()["Rollout/step_rewards_max"] == 0.0


class TestShapes:
    def test_of_observations_of_one_number_the_dtypes_tell_next_ones_from_flags(self) -> None:
        buffer = ReplayBuffer(3, N, (), (), StatsTracker(N))
        seen, flags, following = torch.tensor([1.0, 2.0]), torch.tensor([False, True]), torch.tensor([5.0, 6.0])
        buffer.add(seen, seen, seen, flags, flags, following)
        buffer.add(seen, seen, seen, flags, following, flags.numpy())
        assert buffer._next_observations[:2].tolist() == [[5.0, 6.0]] * 2
        assert buffer._truncateds[:2].tolist() == [[False, True]] * 2

    def test_axes_of_length_one_in_front_make_no_difference(self) -> None:
        buffer = RolloutBuffer(3, 1, (2,), (), StatsTracker(1))
        one = torch.ones(())
        buffer.add(torch.ones(2), one, one, 0.0, one, one)
        buffer.add(torch.ones(1, 1, 2), torch.ones(1, 1), torch.ones(1, 1), torch.zeros(1, 1), [1.0], 1)
        assert buffer._rewards[:2].tolist() == [[1.0], [1.0]]
        replay = ReplayBuffer(3, 1, (2,), (), StatsTracker(1))
        replay.add(torch.ones(2), one, torch.ones(1, 1), torch.zeros(1, 1), torch.zeros(2), torch.zeros(()))
        assert replay.get(1).observations.tolist() == [[1.0, 1.0]]


class TestDicts:
    spec: ClassVar = {"camera": (2, 2), "pose": (3,)}
    dtypes: ClassVar = {"camera": torch.uint8, "pose": torch.float32}

    def seen(self, t: int) -> dict[str, Any]:
        return {"camera": torch.full((N, 2, 2), t, dtype=torch.uint8), "pose": torch.full((N, 3), float(t))}

    @pytest.mark.parametrize("kind", [ReplayBuffer, PrioritizedReplayBuffer])
    def test_replay(self, kind: Any) -> None:
        buffer = kind(4, N, self.spec, (1,), StatsTracker(N), obs_dtype=self.dtypes, seed=0)
        for t in range(6):
            buffer.add(**make_transition(t, self.seen(t)))
        batch = buffer.get(6)
        assert isinstance(batch.observations, TensorDict)
        assert batch.observations["camera"].dtype == torch.uint8
        time = batch.rewards % 10
        assert torch.equal(batch.observations["pose"][:, 0], time)
        assert torch.equal(batch.next_observations["camera"][:, 0, 0], (time + 1).to(torch.uint8))
        with pytest.raises(rl.SchemaError, match=r"obs: expected the keys \['camera', 'pose'\], got the keys"):
            buffer.add(**{**make_transition(1, self.seen(1)), "obs": {"pose": torch.zeros(N, 3)}})

    def test_rollout(self) -> None:
        buffer = RolloutBuffer(3, N, self.spec, (1,), StatsTracker(N), obs_dtype=self.dtypes, seed=0)
        for t in range(3):
            buffer.add(**make_step(t, obs=TensorDict(self.seen(t), [N])))
        buffer.compute_returns_and_advantages(torch.zeros(N), torch.zeros(N))
        for shuffle in (True, False):
            for batch in buffer.get(4, shuffle=shuffle):
                assert torch.equal(batch.observations["pose"][:, 0], batch.observations["camera"][:, 0, 0].float())


class TestSequences:
    def test_every_step_is_in_one_sequence_of_its_episode(self) -> None:
        buffer = make_rollout(4)
        with pytest.raises(rl.NotReadyError, match="compute_returns_and_advantages"):
            buffer.get_sequences(2, 4)
        buffer.compute_returns_and_advantages(torch.zeros(N), torch.zeros(N))
        batches = list(buffer.get_sequences(3, 2, shuffle=False))
        assert all(type(batch) is SequenceBatch for batch in batches)
        seen = [batch.observations[..., 0][batch.masks].tolist() for batch in batches]
        assert [x for part in seen for x in part] == [0, 1, 2, 3, 0, 1, 2, 3]
        first = batches[0]
        # Environment 0 ended an episode at step 2.
        assert first.starts[:, 0].tolist() == [True, True]
        assert first.returns.shape == first.masks.shape == (2, 3)


class Counting(BaseBuffer):
    """A user's buffer that inherits rl-buffer's base class."""

    def __init__(self, **options: Any) -> None:
        super().__init__(3, N, StatsTracker(N), **options)
        self.rows = torch.zeros(3, N)

    def add(self, row: torch.Tensor, fails: bool = False) -> None:
        with self.add_context(torch.zeros(N), row) as pos:
            if fails:
                raise KeyError("row")
            self.rows[pos] = row


class TestMemory:
    """Attributes that rl-buffer's own code reads are the memory, also after assignments."""

    @pytest.mark.parametrize("name", ["observations", "actions", "values", "log_probs"])
    def test_of_a_rollout(self, name: str) -> None:
        buffer = make_rollout(4)
        buffer.compute_returns_and_advantages(torch.zeros(N), torch.zeros(N))
        setattr(buffer, f"_{name}", torch.full_like(getattr(buffer, f"_{name}"), 7))
        assert all(getattr(batch, name).eq(7).all() for batch in buffer.get(3))
        exec(f"buffer._{name} += 1")
        assert all(getattr(batch, name).eq(8).all() for batch in buffer.get(3))

    def test_of_computed_advantages(self) -> None:
        buffer = make_rollout(4)
        buffer._rewards = torch.full((4, N), 2.0)
        buffer._rewards += 1
        assert buffer.core["reward"].eq(3).all()
        buffer.compute_returns_and_advantages(torch.zeros(N), torch.zeros(N))
        buffer._advantages = torch.ones(4, N)
        buffer._advantages *= 3
        assert all(batch.advantages.eq(3).all() for batch in buffer.get(3))
        with pytest.raises(rl.SchemaError, match="expected shape"):
            buffer._returns = torch.ones(1, N)


class TestOwnBuffer:
    def test_recurrent_goes_round(self) -> None:
        buffer = Counting(reset_strategy=ResetStrategy.RECURRENT)
        for t in range(5):
            buffer.add(torch.full((N,), float(t)))
        assert buffer.rows[:, 0].tolist() == [3.0, 4.0, 2.0]
        assert (len(buffer), buffer.full, buffer.total_current_size) == (3, True, 3 * N)

    def test_error_and_auto(self) -> None:
        buffer = Counting()
        for t in range(3):
            buffer.add(torch.full((N,), float(t)))
        with pytest.raises(RuntimeError, match=r"^Buffer is full\. Call reset\(\)"):
            buffer.add(torch.ones(N))
        buffer.reset_strategy = ResetStrategy.AUTO
        buffer.add(torch.full((N,), 9.0))
        assert (len(buffer), buffer.rows[0, 0]) == (1, 9.0)

    @pytest.mark.parametrize("strategy", [ResetStrategy.RECURRENT, ResetStrategy.AUTO])
    def test_rows_of_a_rollout_may_be_written_by_hand(self, strategy: ResetStrategy) -> None:
        buffer = make_rollout(3, reset_strategy=strategy)
        for t in range(3, 6):
            with buffer.add_context(torch.zeros(N), torch.ones(N)) as pos:
                buffer._observations[pos] = float(t)
        expected = [2.0, 3.0, 4.0, 5.0] if strategy is ResetStrategy.RECURRENT else [4.0, 5.0]
        assert buffer._observations[: len(buffer), 0, 0].tolist() == expected
        assert buffer.core["obs"][:, 0, 0].tolist() == expected

    def test_a_step_that_fails_is_not_counted(self) -> None:
        buffer = Counting()
        with pytest.raises(KeyError):
            buffer.add(torch.ones(N), fails=True)
        assert (len(buffer), buffer.stats_tracker._current_episode_stats["lengths"].sum()) == (0, 0)


def add_one(buffer: Any, t: int) -> None:
    buffer.add(**make_transition(t))


def draw_from(buffer: Any, answers: Any) -> None:
    answers.put(buffer.get(2).rewards.tolist())


@pytest.mark.skipif(not hasattr(rl.kernels.native_core(), "ProcessLock"), reason="needs Linux and a compiler")
class TestShared:
    def pair(self, **options: Any) -> tuple[SharedReplayBuffer, SharedReplayBuffer]:
        main = SharedReplayBuffer(3, N, (3,), (1,), StatsTracker(N), True, seed=0, **options)
        components = dict(zip(("shared_memory_components", "shared_states"), main.get_shared_components(), strict=True))
        return main, SharedReplayBuffer(3, N, (3,), (1,), None, False, **components, **options)

    def test_a_worker_needs_no_tracker(self) -> None:
        main, worker = self.pair(store_device=torch.device("cpu"))
        assert isinstance(main, SharedBaseBuffer)
        assert worker.stats_tracker is None
        worker.add(**make_transition(1))
        assert (len(main), main.current_size, main.total_current_size) == (1, 1, N)
        worker.reset(reset_stats=True)
        assert len(main) == 0

    def test_position_and_fullness_are_methods_that_count_for_all(self) -> None:
        main, worker = self.pair()
        for t in range(5):
            assert (worker.pos(), main.full()) == (t % 3, t >= 3)
            main.add(**make_transition(t))
        assert (main.pos(), len(worker)) == (2, 3)
        for refused in (lambda: main.set_pos(1), lambda: SharedReplayBuffer.set_full(self.pair()[0], True)):
            with pytest.raises(ValueError, match="expected"):
                refused()
        # The position is already 2, so nothing changes.
        worker.set_pos(2)
        worker.set_full(True)
        assert len(main) == 3
        worker.set_full(False)
        assert (main.pos(), main.full(), len(main)) == (0, False, 0)
        main.add(**make_transition(7))
        worker.set_pos(0)
        assert len(main) == 0

    def test_the_memory_is_the_hosts(self) -> None:
        with pytest.raises(ValueError, match="store_device: expected the host, got meta"):
            SharedReplayBuffer(3, N, (3,), (1,), StatsTracker(N), True, store_device=torch.device("meta"))

    @pytest.mark.parametrize("strategy", [ResetStrategy.ERROR, ResetStrategy.AUTO])
    def test_a_full_one_refuses_or_starts_again(self, strategy: ResetStrategy) -> None:
        main, worker = self.pair(reset_strategy=strategy)
        for t in range(3):
            main.add(**make_transition(t))
        if strategy is ResetStrategy.AUTO:
            worker.add(**make_transition(3))
            assert len(main) == 1
        else:
            with pytest.raises(RuntimeError, match=r"^Buffer is full\. Call reset\(\)"):
                worker.add(**make_transition(3))

    def test_no_process_adds_between_the_check_and_the_write_of_another(self) -> None:
        main, worker = self.pair(reset_strategy=ResetStrategy.ERROR)
        for t in range(2):
            main.add(**make_transition(t))
        errors: list[str] = []

        def add_from_worker() -> None:
            try:
                worker.add(**make_transition(7))
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=add_from_worker)

        class Interrupted(StatsTracker):
            def update(self, *args: Any, **kwargs: Any) -> None:
                super().update(*args, **kwargs)
                thread.start()
                thread.join(0.5)

        main._stats_tracker = Interrupted(N)
        main.add(**make_transition(2))
        thread.join(60)
        assert [message.split(".")[0] for message in errors] == ["Buffer is full"]
        assert main._rewards[:, 0].tolist() == [0.0, 1.0, 2.0]

    @pytest.mark.parametrize("context", [CONTEXT, multiprocessing.get_context("fork")])
    def test_a_process_may_be_given_the_buffer_itself(self, context: Any) -> None:
        main, worker = self.pair()
        answers = context.Queue()
        for t, buffer in ((1, main), (2, worker)):
            process = context.Process(target=add_one, args=(buffer, t))
            process.start()
            process.join(60)
            assert (process.exitcode, len(main)) == (0, t)
        process = context.Process(target=draw_from, args=(main, answers))
        process.start()
        assert set(answers.get(timeout=60)) <= {1.0, 2.0, 11.0, 12.0}
        process.join(60)
        main.add(**make_transition(3))
        assert main._rewards[:, 0].tolist() == [1.0, 2.0, 3.0]

    @pytest.mark.parametrize("copied", COPIES)
    def test_a_copy_in_the_same_process_has_memory_of_its_own(self, copied: Any) -> None:
        for shared in self.pair():
            shared.add(**make_transition(1))
            other = copied(shared)
            other.add(**make_transition(2))
            shared._rewards.zero_()
            assert (len(shared), len(other), other._rewards.sum()) == (1, 2, 26.0)
            shared.reset()
