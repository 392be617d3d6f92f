"""Staged and lent steps, attached tensors, and memory shared with callers."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import relive as rl
from tests.faults.digest import digest
from tests.rollout.steps import N, make, step


class TestStaging:
    def test_a_staged_observation_survives_an_environment_that_reuses_its_memory(self, backend: str) -> None:
        rollout = make(count=0)
        obs = np.zeros((N, 2), np.float32)
        for t in range(4):
            obs[:] = t
            rollout.stage(obs=obs, action=np.full(N, t))
            rollout.stage(value=np.full(N, 10.0 * t))
            obs[:] = 99
            rollout.add(reward=np.zeros(N), terminated=np.zeros(N, bool), truncated=np.zeros(N, bool))
        assert rollout["obs"][:, 0, 0].tolist() == [0, 1, 2, 3]
        assert rollout["value"][:, 0].tolist() == [0, 10, 20, 30]
        rollout.compute_advantage(np.zeros(N))

    def test_a_field_given_twice_is_refused_and_nothing_changes(self) -> None:
        rollout = make(count=1)
        rollout.stage(obs=np.full((N, 2), 1.0))
        with pytest.raises(rl.SchemaError, match="obs: expected one value per step, got a second value"):
            rollout.add(**step(7))
        with pytest.raises(rl.SchemaError, match="obs: expected one value per step, got a second value"):
            rollout.stage(obs=np.full((N, 2), 8.0))
        rollout.add(**step(1, obs=None))
        assert rollout["obs"][1].tolist() == [[1.0, 1.0]] * N

    def test_add_step_completes_a_staged_step(self) -> None:
        envs = gym.make_vec("CartPole-v1", 2)
        rollout = rl.RolloutBuffer.for_env(envs, 3)
        obs, _ = envs.reset(seed=0)
        for _ in range(3):
            rollout.stage(obs=obs, action=np.ones(2, int))
            before = obs.copy()
            taken = envs.step(np.ones(2, int))
            rollout.add_step(step=taken)
            assert np.allclose(rollout["obs"][-1].numpy(), before)
            obs = taken[0]


class TestLending:
    @staticmethod
    def write(memory: TensorDict, steps: int) -> None:
        """Write recognisable steps into lent memory, then the last observation and value."""
        for t in range(steps):
            for name, value in step(t).items():
                memory[name][:, t] = torch.as_tensor(value)
        memory["obs"][:, steps] = 9
        memory["value"][:, steps] = 5

    @pytest.mark.parametrize("steps", [4, 2])
    def test_steps_written_into_the_memory_are_steps_that_were_added(self, backend: str, steps: int) -> None:
        added, lent = make(count=steps), make(count=0)
        self.write(lent.lend(), steps)
        assert lent.num_stored == 0
        lent.take_back(steps)
        assert lent.num_stored == steps
        assert lent.is_full == (steps == 4)
        for rollout in (added, lent):
            rollout.compute_advantage(np.full(N, 5.0), last_obs=np.full((N, 2), 9.0))
        assert (lent.data == added.data).all()
        assert (lent.env_major() == added.env_major()).all()
        for a, b in zip(lent.minibatches(5), added.minibatches(5), strict=True):
            assert (a == b).all()

    def test_the_last_slot_is_kept_until_another_step_is_added(self) -> None:
        rollout = make(count=0)
        self.write(rollout.lend(), 2)
        rollout.take_back(2)
        assert rollout.env_major()["obs"][:, -1].tolist() == [[9.0, 9.0]] * N
        assert rollout.env_major()["value"][:, -1].tolist() == [5.0] * N
        with pytest.raises(rl.SchemaError, match="action"):
            rollout.add(**step(2, action=np.zeros(N + 1)))
        assert rollout.env_major()["obs"][:, -1].tolist() == [[9.0, 9.0]] * N
        rollout.add(**step(2))
        assert rollout["obs"][:, 0, 0].tolist() == [0.0, 1.0, 2.0]
        assert not rollout.env_major()["obs"][:, -1].any()

    def test_one_environment_keeps_its_last_slot_too(self) -> None:
        rollout = rl.RolloutBuffer(2, None, obs=2, action=())
        rollout.lend()["value"][0, 2] = 5
        rollout.take_back()
        rollout.compute_advantage(5.0, gamma=1.0, lam=1.0)
        assert rollout["advantage"].tolist() == [5.0, 5.0]

    def test_it_is_one_memory_across_rollouts_and_shows_nothing_attached(self) -> None:
        rollout = make()
        rollout.compute_advantage(np.zeros(N))
        first = rollout.lend()
        assert "advantage" not in first.keys()
        assert first["obs"].data_ptr() == rollout["obs"].data_ptr() == rollout.lend()["obs"].data_ptr()
        assert first.batch_size == torch.Size([N, 5])

    def test_taking_back_starts_another_rollout(self) -> None:
        rollout = make()
        rollout.compute_advantage(np.zeros(N))
        batches = rollout.minibatches(4)
        rollout.take_back()
        assert "advantage" not in rollout.data.keys()
        with pytest.raises(rl.NotReadyError, match="a cleared one"):
            next(batches)

    def test_reset_rows_are_no_transitions(self) -> None:
        rollout = make(count=0, autoreset="NEXT_STEP")
        memory = rollout.lend()
        self.write(memory, 4)
        memory["terminated"][1, 1] = True
        rollout.take_back()
        assert (~rollout["mask"]).nonzero().tolist() == [[2, 1]]
        assert len(rollout) == 4 * N - 1

    def test_statistics_are_told_of_new_steps_once(self) -> None:
        rollout = make(count=0, autoreset="NEXT_STEP", stats=rl.EpisodeStats(N))
        memory = rollout.lend()
        self.write(memory, 4)
        memory["terminated"][1, 1] = True
        for steps in (1, 2, 2):
            rollout.take_back(steps)
        assert rollout.stats is not None
        assert rollout.stats.episodes()["return"].tolist() == [0.0 + 1 + 11]
        rollout.add(**step(2, terminated=np.array([False, True, True])))
        assert rollout.stats.num_steps == 3 * N - 1
        assert rollout.stats.episodes()["return"].tolist() == [12.0, 2.0 + 12 + 22]

    def test_no_rows_are_an_empty_rollout(self) -> None:
        rollout = make()
        rollout.take_back(0)
        assert len(rollout) == 0
        rollout.add(**step(3))
        assert rollout["obs"][:, 0, 0].tolist() == [3.0]

    def test_sizes_may_be_numpy_integers(self) -> None:
        rollout = rl.RolloutBuffer(np.int8(127), np.int8(3), obs=1, action=())  # pyright: ignore[reportArgumentType]
        rollout.take_back(np.int64(2))  # pyright: ignore[reportArgumentType]
        assert rollout.num_stored == 2
        rollout.take_back()
        assert rollout.data.shape == (127, 3)

    @pytest.mark.parametrize("wrong", [-1, 5, True, 1.0])
    def test_another_number_of_steps_is_refused(self, wrong: Any) -> None:
        rollout = make(count=2)
        with pytest.raises(rl.SchemaError, match="^take_back: expected 0 to 4 steps"):
            rollout.take_back(wrong)
        assert rollout.num_stored == 2


class TestMemoryInOtherHands:
    def test_columns_that_were_moved_to_shared_memory_are_found_again(self, backend: str) -> None:
        rollout = make(count=2)
        rollout.data.share_memory_()
        rollout.add(**step(2))
        assert rollout["obs"][:, 0, 0].tolist() == [0.0, 1.0, 2.0]
        rollout.add(**step(3))
        batches = rollout.minibatches(4)
        next(batches)
        rollout.data.clone()
        rollout.env_major().share_memory_()
        for batch in batches:
            assert torch.equal(batch["obs"][:, 0], batch["index"] // N)

    def test_statistics_of_lent_rows_that_were_moved_to_shared_memory_are_of_what_was_written_there(self) -> None:
        rollout = make(count=0, stats=rl.EpisodeStats(N))
        memory = rollout.lend().share_memory_()
        TestLending.write(memory, 4)
        memory["terminated"][:, 3] = True
        rollout.take_back()
        assert rollout.stats is not None
        assert rollout.stats.episodes()["return"].tolist() == [60.0, 64.0, 68.0]

    @pytest.mark.parametrize("num_envs", [N, None])
    def test_rows_written_into_the_columns_are_stored_when_they_are_taken_back(self, num_envs: int | None) -> None:
        theirs, ours = make(count=0, num_envs=num_envs), make(count=0, num_envs=num_envs)
        for t in range(3):
            fields = step(t)
            theirs.add(**(fields if num_envs else {name: value[0] for name, value in fields.items()}))
        assert ours.columns.batch_size == ((4, N) if num_envs else (4,))
        ours.columns[:3].update_(theirs.data.exclude("mask"))
        assert ours.num_stored == 0
        ours.take_back(3)
        for rollout in (ours, theirs):
            rollout.compute_advantage(np.zeros(N) if num_envs else 0.0)
        assert (ours.data == theirs.data).all()

    def test_fewer_rows_may_be_taken_back_and_written_behind(self) -> None:
        rollout = make(count=4)
        rollout.attach(extra=torch.zeros(4, N))
        rollout.take_back(1)
        assert "extra" not in rollout.data.keys()
        rollout.add(**step(7))
        assert rollout["obs"][:, 0, 0].tolist() == [0.0, 7.0]
        rollout.take_back(4)
        assert rollout["obs"][:, 0, 0].tolist() == [0.0, 7.0, 2.0, 3.0]

    def test_views_of_the_last_slot_may_be_given_for_it(self) -> None:
        rollout = make()
        rollout.compute_advantage(np.full(N, 5.0), last_obs=np.full((N, 2), 9.0))
        view = rollout.env_major()
        rollout.compute_advantage(view["value"][:, -1], last_obs=view["obs"][:, -1], gamma=0.5)
        assert rollout.env_major()["value"][:, -1].tolist() == [5.0] * N
        assert rollout.env_major()["obs"][:, -1].tolist() == [[9.0, 9.0]] * N

    def test_an_environment_that_steps_in_place_is_noticed(self) -> None:
        rollout = make(count=0, autoreset="DISABLED")
        fields = step(0)
        for obs in (np.zeros((N, 2), np.float32), torch.zeros(N, 2)):
            taken = (obs, fields["reward"], fields["terminated"], fields["truncated"], {})
            with pytest.raises(
                rl.SchemaError, match="next_obs: expected memory apart from obs, got memory shared with obs.*stage"
            ):
                rollout.add_step(obs, fields["action"], taken)
        obs = np.zeros((N, 2), np.float32)
        rollout.stage(obs=obs)
        obs += 1
        rollout.add_step(
            action=fields["action"], step=(obs, fields["reward"], fields["terminated"], fields["truncated"], {})
        )
        assert not rollout["obs"].any()

    def test_out_may_not_be_the_rollout_itself(self) -> None:
        rollout = make()
        out = next(rollout.minibatches(3))
        out["obs"] = rollout.data["obs"][0]
        with pytest.raises(
            rl.SchemaError, match=r"out\.obs: expected memory outside the buffer, got memory of the buffer"
        ):
            rollout.minibatches(3, out=out)
        with pytest.raises(rl.SchemaError, match="out: expected no device= together with out="):
            rollout.minibatches(3, out=out.clone(), device="cpu")
        with pytest.raises(rl.SchemaError, match=r"out\..*: expected contiguous .* on cpu"):
            rollout.minibatches(3, out=out.to("meta"))

    def test_out_may_not_be_a_field_that_is_not_read(self, backend: str) -> None:
        rollout = make()
        rollout.attach(weights=torch.ones(4, N))
        for name in ("value", "weights"):
            out = next(rollout.minibatches(N, fields=["reward"]))
            out["reward"] = rollout.data[name][0]
            before = digest(rollout)
            with pytest.raises(rl.SchemaError, match=r"out\.reward: expected memory outside the buffer"):
                list(rollout.minibatches(N, fields=["reward"], out=out))
            assert digest(rollout) == before

    @pytest.mark.parametrize(
        ("field", "array"),
        [
            ("value", "last.value0"),
            ("obs", "last.obs0"),
            ("terminated", "flags.resetting"),
            ("terminated", "flags.starting"),
            ("terminated", "flags.coming"),
        ],
    )
    def test_out_may_not_be_an_array_of_the_state(self, backend: str, field: str, array: str) -> None:
        rollout = make(autoreset="NEXT_STEP")
        rollout.compute_advantage(np.arange(N), last_obs=np.ones((N, 2)))
        out = next(rollout.minibatches(N, fields=[field]))
        out[field] = rollout.state_dict()["arrays"][array].view(out[field].shape)
        before = digest(rollout)
        with pytest.raises(rl.SchemaError, match=rf"out\.{field}: expected memory outside the buffer"):
            list(rollout.minibatches(N, fields=[field], out=out))
        assert digest(rollout) == before


class TestAttach:
    def test_attached_tensors_join_every_batch_until_clear(self, backend: str) -> None:
        rollout = make()
        rollout.attach({"return": torch.arange(4 * N).view(4, N)}, weights=np.ones((4, N, 5)))
        for batch in rollout.minibatches(5):
            assert torch.equal(batch["return"], batch["index"])
            assert batch["weights"].shape == (len(batch), 5)
        rollout.clear()
        rollout.add(**step(0))
        assert "return" not in next(rollout.minibatches(1)).keys()

    def test_attached_tensors_can_be_replaced_by_values_computed_from_them(self) -> None:
        rollout = make()
        rollout.compute_advantage(np.zeros(N))
        rollout.attach(advantage=rl.normalize(rollout["advantage"]))
        assert abs(float(rollout["advantage"].mean())) < 1e-6

    @pytest.mark.parametrize("name", ["obs", "mask", "index", "log_prob"])
    def test_stored_names_are_refused(self, name: str) -> None:
        with pytest.raises(rl.SchemaError, match=f"^attach: expected an unused name, got {name!r}"):
            make().attach({name: torch.zeros(4, N)})

    def test_attach_accepts_the_types_that_add_accepts(self) -> None:
        rollout = make()
        fixed = np.ones((4, N))
        fixed.flags.writeable = False
        rollout.attach(a=np.ones((4, N))[::-1], b=np.ones((4, N), ">f4"), c=fixed, d=[[1] * N] * 4)
        assert rollout["b"].dtype == torch.float32
        wrongs: list[Any] = [None, "abc", [[1.0], [1.0, 2.0]]]
        for wrong in wrongs:
            with pytest.raises(rl.SchemaError, match="^x: expected"):
                rollout.attach(x=wrong)
        with pytest.raises(rl.SchemaError, match="^attach: expected an unused name, got 'x'"):
            rollout.attach({"x": fixed}, x=fixed)

    @pytest.mark.parametrize("shape", [(N, 4), (4,), (3, N), (4, 1), ()])
    def test_other_leading_shapes_are_refused(self, shape: tuple[int, ...]) -> None:
        rollout = make()
        with pytest.raises(rl.SchemaError, match="^x: expected shape"):
            rollout.attach(good=torch.zeros(4, N), x=torch.zeros(shape))
        assert "good" not in rollout.data.keys()
