"""ApexRL's replay buffer: its ring row by row, its errors, and our corrections."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import relive as rl
from relive.compat import apexrl


def make_batch(*rows: int, **changed: Any) -> dict[str, Any]:
    """Make transitions of rows i: observation i, action i + 0.7, reward 10·i, next observation i + 0.5."""
    row = torch.tensor(rows, dtype=torch.float32)
    fields = {
        "observations": row.unsqueeze(1).repeat(1, 2), "actions": (row + 0.7).unsqueeze(1), "rewards": 10 * row,
        "next_observations": row.unsqueeze(1).repeat(1, 2) + 0.5, "dones": (row % 3 == 0).float(),
    }  # fmt: skip
    return {**fields, **changed}


def make_batch_with_critic(*rows: int) -> dict[str, Any]:
    row = -torch.tensor(rows, dtype=torch.float32)
    return make_batch(*rows, critic_observations=row.view(-1, 1), next_critic_observations=row.view(-1, 1) - 0.5)


def make_replay(capacity: int = 5, **options: Any) -> apexrl.ReplayBuffer:
    return apexrl.ReplayBuffer(capacity, (2,), (1,), seed=0, **options)


def list_stored_rows(buffer: apexrl.ReplayBuffer) -> list[int]:
    """Return the row numbers in memory order, and check every field of these rows."""
    state = buffer.state_dict()
    rows = [round(reward / 10) for reward in state["rewards"].tolist()]
    for name, expected in (make_batch_with_critic if buffer.critic_obs_shape else make_batch)(*rows).items():
        torch.testing.assert_close(state[name], expected, msg=name)
    return rows


class TestReplay:
    @given(st.integers(1, 9), st.lists(st.one_of(st.integers(0, 9), st.none()), max_size=12), st.booleans())
    @settings(deadline=None, max_examples=80)
    def test_is_the_ring_of_apexrl_row_by_row(self, capacity: int, sizes: list[int | None], critic: bool) -> None:
        buffer = make_replay(capacity, critic_obs_shape=(1,) if critic else None)
        ring: list[Any] = [None] * capacity
        pos, count = 0, 0
        for size in sizes:
            if size is None:
                buffer.clear()
                ring, pos = [None] * capacity, 0
            elif size > capacity:
                with pytest.raises(ValueError, match=f"^batch size {size} exceeds replay capacity {capacity}$"):
                    buffer.add(**(make_batch_with_critic if critic else make_batch)(*range(size)))
            else:
                rows = range(count, count + size)
                buffer.add(**(make_batch_with_critic if critic else make_batch)(*rows))
                for row in rows:
                    ring[pos] = row
                    pos = (pos + 1) % capacity
                count += size
            held = [row for row in ring if row is not None]
            assert list_stored_rows_or_none(buffer) == held
            assert (buffer.pos, buffer.full) == (pos, len(held) == capacity)
            assert buffer.size == len(buffer) == len(held)

    def test_draws_are_uniform_with_replacement_and_rows_stay_whole(self) -> None:
        buffer = make_replay(8, critic_obs_shape=(1,))
        buffer.add(**make_batch_with_critic(*range(5)))
        buffer.add(**make_batch_with_critic(*range(5, 11)))
        actual = torch.cat([buffer.sample(8)["rewards"] for _ in range(100)])
        counts = torch.bincount((actual / 10).long(), minlength=11)
        assert counts[:3].tolist() == [0, 0, 0]
        # Chi-square test with 7 degrees of freedom, p < 0.0004.
        assert (counts[3:] - 100).square().sum() / 100 < 27
        drawn = buffer.sample(8)
        assert list(drawn) == [
            "observations", "actions", "rewards", "next_observations", "dones",
            "critic_observations", "next_critic_observations",
        ]  # fmt: skip
        expected = make_batch_with_critic(*(int(reward / 10) for reward in drawn["rewards"]))
        for name, tensor in drawn.items():
            torch.testing.assert_close(tensor, expected[name], msg=name)

    def test_the_first_actions_say_which_dtype_and_later_ones_keep_it(self) -> None:
        for actions, dtype in (
            (torch.tensor([[3]]), torch.int64),
            (torch.tensor([[0.7]]), torch.float32),
            (np.array([[0.7]]), torch.float32),
        ):
            buffer = make_replay()
            assert buffer.action_dtype is None
            buffer.add(**make_batch(1, actions=actions))
            assert buffer.action_dtype == buffer.sample(1)["actions"].dtype == dtype
        discrete = make_replay()
        discrete.add(**make_batch(1, actions=torch.tensor([[3]])))
        with pytest.raises(rl.SchemaError, match="action: expected int64, got float32"):
            discrete.add(**make_batch(2))
        assert len(discrete) == 1

    def test_a_first_batch_that_is_refused_has_said_nothing(self) -> None:
        buffer = make_replay()
        with pytest.raises(rl.SchemaError, match="reward"):
            buffer.add(**make_batch(1, 2, actions=torch.tensor([[3], [4]]), rewards=torch.ones(1)))
        assert (buffer.action_dtype, buffer.size, buffer.pos) == (None, 0, 0)
        buffer.add(**make_batch(1, 2))
        assert list_stored_rows(buffer) == [1, 2]

    def test_scalar_actions_are_the_default(self) -> None:
        buffer = apexrl.ReplayBuffer(4, (2,))
        buffer.add(**make_batch(1, 2, actions=torch.tensor([5, 5])))
        assert buffer.sample(2)["actions"].tolist() == [5, 5]

    def test_one_transition_needs_no_batch_axis(self) -> None:
        buffer = make_replay()
        for row in range(7):
            buffer.add(**{name: tensor[0] for name, tensor in make_batch(row).items()})
        assert list_stored_rows(buffer) == [5, 6, 2, 3, 4]
        buffer.add([1.0, 1.0], [1.7], 10.0, [1.5, 1.5], False)
        assert list_stored_rows(buffer) == [5, 6, 1, 3, 4]

    def test_nothing_is_broadcast(self) -> None:
        buffer = make_replay()
        for wrong in (
            {"rewards": torch.ones(1)}, {"rewards": torch.ones(3, 1)}, {"dones": torch.ones(1)},
            {"actions": torch.ones(3)}, {"next_observations": torch.ones(1, 2)}, {"observations": torch.ones(3, 1)},
        ):  # fmt: skip
            with pytest.raises(rl.SchemaError, match="expected shape"):
                buffer.add(**make_batch(1, 2, 3, **wrong))
        assert len(buffer) == 0

    def test_one_memory_for_both_observations_is_stored_as_given_and_told_once(self) -> None:
        buffer = make_replay()
        in_place = torch.ones(3, 2)
        with pytest.warns(rl.DataWarning, match="observations: expected those before the step.*reuses its memory"):
            buffer.add(**make_batch(1, 2, 3, observations=in_place, next_observations=in_place))
        buffer.add(in_place[0], torch.ones(1), 1.0, in_place[0], False)
        assert buffer.state_dict()["next_observations"].eq(1).all()
        path = torch.arange(4.0).unsqueeze(1).repeat(1, 2)
        # A capacity of 6 is a multiple of the batch of 3 rows, 5 is none.
        for capacity in (5, 6):
            buffer = make_replay(capacity)
            buffer.add(**make_batch(1, 2, 3, observations=path[:-1], next_observations=path[1:]))
            assert buffer.next_observations[:3, 0].tolist() == [1.0, 2.0, 3.0]

    @pytest.mark.parametrize("envs", [1, 4])
    def test_an_environment_that_steps_in_place_is_noticed_although_the_next_observations_are_copies(
        self, envs: int
    ) -> None:
        buffer, world = make_replay(100), torch.zeros(envs, 2)
        noticed = 0
        for t in range(6):
            # The environment writes its next observation into the same memory.
            world += 1
            rows = {**make_batch(*range(t, t + envs)), "observations": world, "next_observations": world.clone()}
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                buffer.add(**rows)
            noticed += len(told)
        assert noticed == 1

    def test_a_world_that_stands_still_and_one_that_is_copied_are_not_suspected(self) -> None:
        buffer, world = make_replay(100), torch.zeros(2, 2)
        for t in range(6):
            obs = world.clone() if t > 3 else world
            world = world + 1 if t > 2 else world
            buffer.add(**{**make_batch(t, t), "observations": obs, "next_observations": world.clone()})
        assert len(buffer) == 12

    def test_critic_observations_are_never_stale_and_never_dropped(self) -> None:
        with_them, without = make_replay(critic_obs_shape=(1,)), make_replay()
        with pytest.raises(rl.SchemaError, match="^critic_observations: expected a value, got None"):
            with_them.add(**make_batch(1))
        with pytest.raises(
            rl.SchemaError, match="critic_observations: expected None without critic_obs_shape, got Tensor"
        ):
            without.add(**make_batch_with_critic(1))
        given = make_batch_with_critic(1)
        given.pop("critic_observations")
        with pytest.raises(rl.SchemaError, match="next_critic_observations: expected None without critic_obs_shape"):
            without.add(**given)
        assert len(with_them) == len(without) == 0

    @pytest.mark.parametrize("capacity", [0, -3])
    def test_a_capacity_is_positive(self, capacity: int) -> None:
        with pytest.raises(ValueError, match=f"^capacity: expected a positive int, got {capacity}"):
            make_replay(capacity)

    def test_batches_are_positive_and_no_larger_than_what_is_stored(self) -> None:
        buffer = make_replay()
        with pytest.raises(ValueError, match="^batch_size: expected at most 0"):
            buffer.sample(1)
        buffer.add(**make_batch(1, 2))
        with pytest.raises(ValueError, match="^batch_size: expected at most 2"):
            buffer.sample(3)
        for wrong in (0, -1):
            with pytest.raises(ValueError, match=f"^batch_size: expected an int of at least 1, got {wrong}"):
                buffer.sample(wrong)

    def test_nested_observations_are_tensordicts_with_dtypes_of_their_own(self) -> None:
        spec = {"camera": apexrl.TensorLeafSpec((2, 2), torch.uint8), "body": {"pose": (3,)}}
        buffer = apexrl.ReplayBuffer(5, spec, critic_obs_shape={"mass": ()}, obs_dtype=torch.float64)
        for size in (3, 4):
            seen = [
                {
                    "camera": torch.full((size, 2, 2), 7 + later, dtype=torch.uint8),
                    "body": {"pose": torch.full((size, 3), 0.5 + later)},
                }
                for later in range(2)
            ]
            critics = [{"mass": torch.full((size,), 2.0 + later)} for later in range(2)]
            buffer.add(seen[0], torch.arange(size), torch.ones(size), seen[1], torch.zeros(size), *critics)
        drawn = buffer.sample(4)
        assert isinstance(drawn["observations"], TensorDict)
        assert drawn["observations"]["camera"].eq(7).all()
        assert drawn["next_observations"]["camera"].dtype == torch.uint8
        assert drawn["next_observations"]["body", "pose"].eq(1.5).all()
        assert drawn["observations"]["body", "pose"].dtype == torch.float64
        assert drawn["critic_observations"]["mass"].tolist() == [2.0] * 4
        assert drawn["next_critic_observations"]["mass"].tolist() == [3.0] * 4
        other = apexrl.ReplayBuffer(5, spec, critic_obs_shape={"mass": ()}, obs_dtype=torch.float64)
        state = buffer.state_dict()
        assert type(state["observations"]) is type(state["next_critic_observations"]) is dict
        other.load_state_dict(state)
        assert other.sample(2)["observations"]["camera"].eq(7).all()
        rest = (torch.zeros(1), torch.zeros(1), seen[1], torch.zeros(1), *critics)
        with pytest.raises(TypeError, match="expected a dict with|expected a tensor"):
            buffer.add(torch.zeros(1, 3), *rest)
        with pytest.raises(ValueError, match=r"expected the keys .*, got the keys \[\]"):
            buffer.add({}, *rest)
        with pytest.raises(rl.SchemaError, match="expected the keys"):
            buffer.add({"body": seen[0]["body"]}, *rest)

    @pytest.mark.parametrize("sizes", [[], [3], [5], [4, 4], [5, 5, 2]])
    def test_a_state_survives_a_file_that_holds_no_objects(self, tmp_path: Path, sizes: list[int]) -> None:
        leaf = apexrl.TensorLeafSpec((2,), torch.float32)
        buffer, other = (apexrl.ReplayBuffer(5, leaf, (1,), critic_obs_shape=(1,)) for _ in range(2))
        count = 0
        for size in sizes:
            buffer.add(**make_batch_with_critic(*range(count, count + size)))
            count += size
        torch.save(buffer.state_dict(), tmp_path / "state.pt")
        other.add(**make_batch_with_critic(*range(90, 95)))
        other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        # Both buffers overwrite the same rows next.
        for _ in range(3):
            assert list_stored_rows_or_none(other) == list_stored_rows_or_none(buffer)
            assert (other.pos, other.full, other.size) == (buffer.pos, buffer.full, buffer.size)
            for one in (buffer, other):
                one.add(**make_batch_with_critic(count, count + 1))
            count += 2

    def test_a_state_that_apexrl_wrote_is_read(self) -> None:
        """The state has a TensorDict and an object of ApexRL's own class of leaf specifications."""
        foreign = SimpleNamespace(shape=(2,), dtype=torch.float32)
        spec = {"x": apexrl.TensorLeafSpec((2,), torch.float32)}
        buffer = apexrl.ReplayBuffer(3, spec, (1,))
        # Row 3 was written last, over row 0.
        row = torch.tensor([3.0, 1.0, 2.0])
        obs = TensorDict({"x": row.unsqueeze(1).repeat(1, 2)}, [3])
        buffer.load_state_dict(
            {
                "capacity": 3, "obs_shape": {"x": foreign}, "action_shape": [1], "critic_obs_shape": None,
                "obs_dtype": torch.float32, "action_dtype": torch.float32, "pos": 1, "full": True, "size": 3,
                "observations": obs, "next_observations": obs + 1, "actions": row.unsqueeze(1), "rewards": row,
                "dones": torch.zeros(3), "critic_observations": None, "next_critic_observations": None,
            }
        )  # fmt: skip
        new = {"x": torch.full((1, 2), 4.0)}
        buffer.add(new, torch.full((1, 1), 4.0), torch.full((1,), 4.0), {"x": new["x"] + 1}, torch.zeros(1))
        assert buffer.state_dict()["rewards"].tolist() == [3.0, 4.0, 2.0]

    def test_a_state_of_another_layout_is_refused_and_changes_nothing(self) -> None:
        buffer = make_replay(critic_obs_shape=(1,))
        buffer.add(**make_batch_with_critic(1, 2))
        state = buffer.state_dict()
        for name in ("obs_shape", "action_shape", "critic_obs_shape"):
            with pytest.raises(ValueError, match=f"^ReplayBuffer {name} mismatch$"):
                buffer.load_state_dict({**state, name: (9,)})
        with pytest.raises(ValueError, match="^capacity: expected 5, this buffer's, got 9"):
            buffer.load_state_dict({**state, "capacity": 9})
        with pytest.raises(rl.SchemaError):
            buffer.load_state_dict({**state, "rewards": torch.ones(2, 2)})
        assert list_stored_rows(buffer) == [1, 2]

    def test_a_state_and_a_batch_are_the_callers_own(self) -> None:
        buffer = make_replay()
        buffer.add(**make_batch(1, 2))
        buffer.state_dict()["observations"].zero_()
        buffer.sample(2)["rewards"].zero_()
        assert list_stored_rows(buffer) == [1, 2]

    def test_attributes_are_the_memory_and_nothing_written_is_lost(self) -> None:
        # A capacity of 4 is a multiple of the batch of 2 rows, 5 is none.
        for capacity in (4, 5):
            buffer = make_replay(capacity, critic_obs_shape=(1,))
            assert buffer.observations.shape == (capacity, 2)
            for rows in ((1, 2), (3, 4), (5, 6)):
                buffer.add(**make_batch_with_critic(*rows))
            buffer.rewards *= 2
            buffer.dones[0] = 1
            buffer.actions = torch.full((capacity, 1), 0.5)
            buffer.next_critic_observations[:] = 7
            drawn = buffer.sample(4)
            assert drawn["actions"].eq(0.5).all()
            assert drawn["next_critic_observations"].eq(7).all()
            torch.testing.assert_close(drawn["rewards"], 20 * drawn["observations"][:, 0])
            assert buffer.state_dict()["dones"][0] == 1
            with pytest.raises(rl.SchemaError, match="reward: expected shape"):
                buffer.rewards = torch.zeros(capacity, 1)
            for name in ("pos", "full", "size"):
                with pytest.raises(AttributeError):
                    setattr(buffer, name, 0)
        assert make_replay().critic_observations is None


def list_stored_rows_or_none(buffer: apexrl.ReplayBuffer) -> list[int]:
    return list_stored_rows(buffer) if buffer.size else []


def test_axes_of_length_one_of_one_transition_make_no_difference() -> None:
    buffer = make_replay()
    given = make_batch(3)
    buffer.add(**{**given, "rewards": given["rewards"].view(1, 1), "dones": given["dones"].view(1, 1)})
    buffer.add(**make_batch(3))
    drawn = buffer.sample(2)
    assert drawn["rewards"].tolist() == [30, 30]
    assert drawn["dones"].tolist() == [1, 1]
    with pytest.raises(rl.SchemaError, match="reward: expected shape"):
        buffer.add(**make_batch(1, 2, rewards=torch.ones(2, 1)))


@pytest.mark.parametrize("obs_shape", [5, {"a": 5}], ids=["int", "dict"])
def test_an_int_is_the_length_of_an_observation(obs_shape: Any) -> None:
    buffer = apexrl.ReplayBuffer(4, obs_shape)
    obs = {"a": torch.zeros(3, 5)} if isinstance(obs_shape, dict) else torch.zeros(3, 5)
    buffer.add(obs, torch.zeros(3), torch.zeros(3), copy.deepcopy(obs), torch.zeros(3))
    assert len(buffer) == 3
