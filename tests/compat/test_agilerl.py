"""AgileRL's rollout buffer on our core: its documented behaviour and our corrections."""

from __future__ import annotations

import pickle
import re
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

import relive as rl
from relive.compat.agilerl import BPTTSequenceType, RolloutBuffer
from tests.reference import agilerl as reference
from tests.reference import estimators

BOX = spaces.Box(-np.inf, np.inf, (2,))
KINDS = (BPTTSequenceType.CHUNKED, BPTTSequenceType.MAXIMUM, BPTTSequenceType.FIFTY_PERCENT_OVERLAPPING)


def make_buffer(capacity: int, num_envs: int = 1, **options: Any) -> RolloutBuffer:
    return RolloutBuffer(capacity, BOX, spaces.Discrete(3), num_envs=num_envs, **options)


def make_recurrent_buffer(capacity: int, num_envs: int = 1, **options: Any) -> RolloutBuffer:
    architecture = {"actor": (2, num_envs, 3), "critic": (1, num_envs, 4)}
    return make_buffer(capacity, num_envs, recurrent=True, hidden_state_architecture=architecture, **options)


def add_steps(target: RolloutBuffer, dones: Any, start: int = 0) -> None:
    """Add steps start, start + 1, …, whose numbers all depend on time t and environment n: x = 100·t + n."""
    for t, done in enumerate(np.asarray(dones, dtype=bool), start):
        env = np.arange(target.num_envs) + 100.0 * t
        hidden = {"actor": torch.tensor(env).float().expand(2, -1).unsqueeze(-1).repeat(1, 1, 3)}
        hidden["critic"] = hidden["actor"][:1, :, :1].repeat(1, 1, 4)
        target.add(
            np.stack([env, -env], 1).astype(np.float32),
            np.full(target.num_envs, t % 3),
            env / 7,
            done,
            env / 3,
            env / 5,
            hidden_state=hidden if target.recurrent else None,
        )


def test_sequence_types_have_the_documented_names_and_the_librarys() -> None:
    assert BPTTSequenceType.FIFTY_PERCENT_OVERLAPPING is BPTTSequenceType.FIFTY_PERCENT_OVERLAP
    assert [kind.value for kind in BPTTSequenceType] == ["chunked", "maximum", "fifty_percent_overlap"]


FLAT_BLOCK = """
from relive.compat.agilerl import BPTTSequenceType, RolloutBuffer

buffer = RolloutBuffer(
    capacity=2048,  # Number of steps to collect per environment
    observation_space=env.observation_space,
    action_space=env.action_space,
    num_envs=8,  # Number of parallel environments
    device=device,
    gae_lambda=0.95,  # GAE lambda parameter
    gamma=0.99,  # Discount factor
)
"""
RECURRENT_OPTIONS = """    recurrent=True,
    hidden_state_architecture=hidden_state_architecture,
    bptt_sequence_type=BPTTSequenceType.MAXIMUM,
)
"""


def test_the_code_blocks_of_the_document_run() -> None:
    names: dict[str, Any] = {"env": gym.make("CartPole-v1"), "device": "cpu"}
    names["hidden_state_architecture"] = {"actor": (1, 8, 64)}
    exec(FLAT_BLOCK, names)
    assert names["buffer"].buffer["observations"].shape == (2048, 8, 4)
    exec(FLAT_BLOCK.removesuffix(")\n") + RECURRENT_OPTIONS, names)
    assert names["buffer"].buffer["hidden_states", "actor"].shape == (2048, 8, 1, 64)


SPACES: list[tuple[spaces.Space[Any], Any]] = [
    (spaces.Box(0, 255, (4, 4, 1), np.uint8), (4, 4, 1)),
    (spaces.Discrete(5), (1,)),
    (spaces.MultiDiscrete([3, 4]), (2,)),
    (spaces.MultiBinary((2, 3)), (2, 3)),
    (spaces.Dict(camera=spaces.Box(0, 1, (3,)), arm=spaces.Dict(grip=spaces.Discrete(2))), None),
]


def leaves(observations: Any) -> list[Any]:
    return list(observations.values(True, True)) if isinstance(observations, TensorDict) else [observations]


def make_batch(space: spaces.Space[Any], rng: int, count: int) -> Any:
    space.seed(rng)
    return gym.vector.utils.concatenate(
        space, [space.sample() for _ in range(count)], gym.vector.utils.create_empty_array(space, count)
    )


@pytest.mark.parametrize(("space", "shape"), SPACES, ids=lambda part: type(part).__name__)
def test_observations_of_every_space_are_stored_as_float32_rows(space: spaces.Space[Any], shape: Any) -> None:
    target = RolloutBuffer(3, space, spaces.Discrete(2), num_envs=2)
    first, second = make_batch(space, 0, 2), make_batch(space, 1, 2)
    target.add(first, [0, 1], [0.0, 0.0], [False, False], [0.0, 0.0], [0.0, 0.0], next_obs=second)
    for name, given_ in (("observations", first), ("next_observations", second)):
        stored = target.buffer[name]
        if isinstance(space, spaces.Dict):
            assert torch.equal(stored["camera"][0], torch.as_tensor(given_["camera"]))
            assert torch.equal(stored["arm", "grip"][0], torch.as_tensor(given_["arm"]["grip"]).float().unsqueeze(1))
        else:
            assert torch.equal(stored[0], torch.as_tensor(given_).float().reshape(2, *shape))
        assert all(leaf.dtype == torch.float32 for leaf in leaves(stored))
    assert target.buffer.batch_size == (3, 2)


@pytest.mark.parametrize(
    ("space", "action", "stored"),
    [
        (spaces.Discrete(5), [3, 1], [[3], [1]]),
        (spaces.Discrete(5), [[3], [1]], [[3], [1]]),
        (spaces.MultiDiscrete([3, 3]), [[0, 2], [1, 1]], [[0, 2], [1, 1]]),
        (spaces.MultiBinary(2), [[0, 1], [1, 1]], [[0, 1], [1, 1]]),
        (spaces.Box(-1, 1, (2, 1)), [[[0.5], [0.25]], [[0.0], [1.0]]], [[0.5, 0.25], [0, 1]]),
    ],
)
def test_actions_are_flat_float32_rows(space: spaces.Space[Any], action: Any, stored: Any) -> None:
    target = RolloutBuffer(2, BOX, space, num_envs=2)
    target.add(np.zeros((2, 2)), np.array(action), np.zeros(2), np.zeros(2, bool), np.zeros(2), np.zeros(2))
    assert torch.equal(target.buffer["actions"][0], torch.tensor(stored).float())


def test_one_environment_takes_numbers_and_bare_observations() -> None:
    target = RolloutBuffer(2, spaces.Discrete(9), spaces.Discrete(3))
    target.add(7, 2, 1.5, True, 0.5, -0.25, episode_start=True)
    row = target.get_tensor_batch()
    assert [row[name].item() for name in ("observations", "actions", "rewards", "dones")] == [7.0, 2.0, 1.5, True]
    assert [row[name].item() for name in ("values", "log_probs", "episode_starts")] == [0.5, -0.25, True]


def test_columns_of_one_number_and_a_leading_axis_are_taken() -> None:
    target = make_buffer(2, 3)
    column = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
    target.add(np.ones((1, 3, 2)), column, column, np.array([[0.0], [1.0], [0.0]]), column, column.T)
    assert target.buffer["values"][0].tolist() == target.buffer["log_probs"][0].tolist() == [1, 2, 3]
    assert target.buffer["dones"][0].tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("obs", np.zeros((3, 2)), "obs: expected shape (2, 2) for 2 environments, got (3, 2)"),
        ("action", np.zeros((3, 1)), "action: expected shape (2, 1) for 2 environments, got (3, 1)"),
        ("reward", 1.0, "reward: expected shape (2,) for 2 environments, got ()"),
        ("reward", np.zeros((2, 2)), "reward: expected shape (2,) for 2 environments, got (2, 2)"),
        ("hidden_state", {"actor": np.zeros((2, 3)), "critic": np.zeros((1, 2, 4))}, "hidden_states.actor: expected"),
        ("hidden_state", {"actor": np.zeros((2, 2, 3))}, "expected the keys ['actor', 'critic']"),
        ("action_mask", np.ones((2, 4)), "action_masks: expected shape (2, 3)"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_changes(name: str, value: Any, message: str) -> None:
    target = make_recurrent_buffer(2, 2)
    add_steps(target, [[0, 1]])
    before = target.buffer.clone()
    zeros = np.zeros(2, np.float32)
    step = {"obs": np.zeros((2, 2)), "action": zeros, "reward": zeros, "done": zeros, "value": zeros, "log_prob": zeros}
    with pytest.raises(ValueError, match=re.escape(message)):
        target.add(**(step | {name: value}))
    assert (target.pos, target.full) == (1, False)
    assert (target.buffer[:1] == before[:1]).all()


def test_hidden_states_come_as_torch_has_them_or_as_the_document_says() -> None:
    target = make_recurrent_buffer(2, 5)
    actor, critic = np.arange(30.0).reshape(2, 5, 3), np.arange(20.0).reshape(5, 4)
    zeros = np.zeros(5, np.float32)
    target.add(
        np.zeros((5, 2)),
        zeros,
        zeros,
        zeros,
        zeros,
        zeros,
        hidden_state={"actor": actor, "critic": torch.tensor(critic)},
    )
    assert target.buffer["hidden_states", "actor"][0].tolist() == actor.swapaxes(0, 1).tolist()
    assert target.buffer["hidden_states", "critic"][0].tolist() == critic[:, None].tolist()


def test_action_masks_appear_with_the_first_and_are_all_legal_before() -> None:
    target = make_buffer(4)
    zeros = np.zeros(1, np.float32)
    target.add(np.zeros(2), 0, zeros, False, zeros, zeros)
    assert "action_masks" not in target.buffer.keys()
    assert "action_masks" not in target.get_tensor_batch().keys()
    target.add(np.zeros(2), 0, zeros, False, zeros, zeros, action_mask=np.array([1, 0, 1]))
    assert target.buffer["action_masks"][:2, 0].tolist() == [[True] * 3, [True, False, True]]
    assert target.get()["action_masks"].tolist() == [[True] * 3, [True, False, True]]


def test_what_is_left_out_of_a_step_is_not_what_the_rollout_before_had() -> None:
    target = make_recurrent_buffer(1, 2)
    zeros, ones = np.zeros(2, np.float32), np.ones(2, np.float32)
    hidden = {"actor": np.ones((2, 2, 3)), "critic": np.ones((1, 2, 4))}
    target.add(
        np.ones((2, 2)), zeros, ones, ones, ones, ones,
        next_obs=np.ones((2, 2)), hidden_state=hidden, episode_start=ones, action_mask=np.zeros((2, 3)),
    )  # fmt: skip
    target.compute_returns_and_advantages(ones, zeros)
    target.reset()
    target.add(np.ones((2, 2)), zeros, ones, ones, ones, ones)
    batch = target.get_tensor_batch()
    for name in ("next_observations", "episode_starts", "advantages", "returns", ("hidden_states", "actor")):
        assert not batch[name].any(), name
    assert batch["action_masks"].all()


def test_what_is_assigned_to_the_memory_is_stored_and_new_names_are_refused() -> None:
    target = make_buffer(3, 2)
    add_steps(target, np.zeros((2, 2)))
    target.buffer["advantages"][:2] = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert target.get_tensor_batch()["advantages"].tolist() == [1, 2, 3, 4]
    target.buffer["advantages"] += 1
    assert target.get_tensor_batch()["advantages"].tolist() == [2, 3, 4, 5]
    target.buffer["advantages"] = torch.full((3, 2), 7.0)
    assert target.get_tensor_batch()["advantages"].tolist() == [7] * 4
    part = target.buffer[:2]
    part["advantages"] = torch.zeros(2, 2)
    assert target.get_tensor_batch()["advantages"].tolist() == [7] * 4
    target.buffer[:2] = part
    assert not target.get_tensor_batch()["advantages"].any()
    with pytest.raises(KeyError, match="bonus"):
        target.buffer["bonus"] = torch.zeros(3, 2)


@pytest.mark.parametrize(
    ("observation_space", "action_space", "error", "message"),
    [
        (spaces.Tuple((BOX, BOX)), BOX, AssertionError, "any space but a Tuple"),
        (spaces.Text(3), BOX, NotImplementedError, "observation_space: expected Box, Discrete"),
        (BOX, spaces.Text(3), NotImplementedError, "action_space: expected Box, Discrete"),
    ],
)
def test_unsupported_spaces_are_refused(
    observation_space: Any, action_space: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        RolloutBuffer(2, observation_space, action_space)


def test_an_observation_of_a_dict_space_must_be_a_dict() -> None:
    target = RolloutBuffer(2, spaces.Dict(a=BOX), BOX)
    with pytest.raises(AssertionError, match="obs: expected a dict with"):
        target.add(np.zeros(2), np.zeros(2), 0.0, False, 0.0, 0.0)
    with pytest.raises(ValueError, match=re.escape("obs: expected the keys ['a'], got the keys ['a', 'b']")):
        target.add({"a": np.zeros(2), "b": np.zeros(2)}, np.zeros(2), 0.0, False, 0.0, 0.0)


def test_a_recurrent_buffer_needs_an_architecture() -> None:
    with pytest.raises(ValueError, match="hidden_state_architecture must be provided"):
        make_buffer(2, recurrent=True)


def test_a_full_buffer_refuses_a_step_unless_it_wraps() -> None:
    target = make_buffer(2, 3)
    add_steps(target, np.zeros((2, 3)))
    assert (target.pos, target.full, target.size()) == (2, True, 6)
    with pytest.raises(ValueError, match="Buffer has reached capacity: all 2 steps"):
        add_steps(target, np.zeros((1, 3)))
    target.wrap_at_capacity = True
    add_steps(target, np.zeros((1, 3)), start=2)
    assert (target.pos, target.full, target.size()) == (1, True, 6)
    assert target.buffer["observations"][:, 0, 0].tolist() == [200, 100]


def test_reset_forgets_steps_and_sequences() -> None:
    target = make_recurrent_buffer(2, 2)
    add_steps(target, np.zeros((2, 2)))
    target.prepare_sequence_tensors()
    target.reset()
    assert (target.pos, target.full, target.size()) == (0, False, 0)
    caches = ("padded_data", "unpadded_data", "unpadded_slices", "num_sequences", "max_sequence_length")
    assert [getattr(target, name) for name in caches] == [None] * 5
    with pytest.raises(ValueError, match="before preparing sequences"):
        next(target.get_minibatch_sequences(1))


@pytest.mark.parametrize("use_gae", [True, False])
def test_an_episodes_end_is_its_own_steps_in_both_estimators(use_gae: bool) -> None:
    target = make_buffer(3, gamma=1.0, gae_lambda=1.0, use_gae=use_gae)
    for value, done in ((0.0, False), (0.0, True), (10.0, False)):
        target.add(np.zeros(2), 0, 1.0, done, value, 0.0)
    target.compute_returns_and_advantages(np.zeros(1), np.zeros(1))
    assert target.buffer["returns"][:, 0].tolist() == [2, 1, 1]
    assert target.buffer["advantages"][:, 0].tolist() == [2, 1, -9]


def test_advantages_of_a_discounted_rollout_are_the_written_out_ones() -> None:
    target = make_buffer(5, gamma=0.9, gae_lambda=0.8)
    for t, reward in enumerate((10.0, 0.0, 0.0, 100.0, 0.0)):
        target.add(np.zeros(2), 0, reward, t == 2, t + 1.0, 0.0)
    target.compute_returns_and_advantages(torch.zeros(1, 1), np.array([[False]]))
    assert target.buffer["advantages"][:, 0].tolist() == pytest.approx([9.7488, -1.46, -3, 96.9, -5])


@pytest.mark.parametrize("use_gae", [True, False])
@pytest.mark.parametrize(("done", "last_done", "expected"), [(0, 0, 6), (0, 1, 1), (1, 1, 1), (1, 0, 6)])
def test_the_newest_step_bootstraps_unless_its_episode_is_over_for_good(
    use_gae: bool, done: int, last_done: int, expected: float
) -> None:
    target = make_buffer(1, gamma=0.5, use_gae=use_gae)
    target.add(np.zeros(2), 0, 1.0, done, 3.0, 0.0)
    target.compute_returns_and_advantages([10.0], [last_done])
    assert target.buffer["returns"].item() == expected


@given(st.data())
def test_returns_match_the_written_out_recurrences_also_after_a_wrap(data: st.DataObject) -> None:
    capacity, envs = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    steps, use_gae = data.draw(st.integers(1, 3 * capacity)), data.draw(st.booleans())
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    reward, value = (torch.randn(steps, envs, generator=rng) for _ in range(2))
    done = torch.rand(steps, envs, generator=rng) < 0.3
    last, over = torch.randn(envs, generator=rng), torch.rand(envs, generator=rng) < 0.3
    target = make_buffer(capacity, envs, gamma=0.9, gae_lambda=0.7, use_gae=use_gae, wrap_at_capacity=True)
    for t in range(steps):
        target.add(np.zeros((envs, 2)), np.zeros(envs), reward[t], done[t], value[t], np.zeros(envs))
    target.compute_returns_and_advantages(last, over)

    kept = slice(max(steps - capacity, 0), steps)
    reward, value, done = reward[kept], value[kept], done[kept]
    tensors: dict[str, torch.Tensor | None] = {
        "reward": reward, "value": value, "next_value": torch.cat([value[1:], last[None]]),
        "terminated": torch.cat([done[:-1], over[None]]), "truncated": torch.zeros_like(done), "mask": None,
    }  # fmt: skip
    if use_gae:
        advantage, return_ = estimators.by_column(estimators.gae, tensors, gamma=0.9, lam=0.7)
    else:
        (return_,) = estimators.by_column(estimators.lambda_return, tensors, gamma=0.9, lam=1.0)
        advantage = return_ - value
    batch = target.get_tensor_batch()
    assert torch.allclose(batch["advantages"].double(), advantage.flatten(), atol=1e-5)
    assert torch.allclose(batch["returns"].double(), return_.flatten(), atol=1e-5)
    assert torch.equal(batch["rewards"], reward.flatten())


def test_computing_returns_of_nothing_says_what_to_do() -> None:
    with pytest.raises(
        rl.NotReadyError, match="compute_returns_and_advantages: expected at least 1 stored step, got 0"
    ):
        make_buffer(2).compute_returns_and_advantages(np.zeros(1), np.zeros(1))
    target = make_buffer(2)
    target.add(np.zeros(2), 0, 0.0, False, 0.0, 0.0)
    with pytest.raises(ValueError, match=re.escape("last_value: expected shape (1,), got (2,)")):
        target.compute_returns_and_advantages(np.zeros(2), np.zeros(1))


def test_get_gives_arrays_and_get_tensor_batch_tensors_of_all_steps_in_time_order() -> None:
    target = make_recurrent_buffer(4, 2)
    add_steps(target, np.zeros((3, 2)))
    flat = [0, 1, 100, 101, 200, 201]
    arrays, tensors = target.get(), target.get_tensor_batch()
    assert isinstance(arrays["hidden_states"], dict)
    assert arrays["observations"][:, 0].tolist() == arrays["hidden_states"]["actor"][:, 1, 2].tolist() == flat
    assert tensors.batch_size == (6,)
    assert tensors["observations"][:, 1].tolist() == [-x for x in flat]


def test_a_batch_is_a_random_part_without_repetition_and_the_callers_own() -> None:
    target = make_buffer(40, 2)
    add_steps(target, np.zeros((40, 2)))
    steps = [100.0 * t + n for t in range(40) for n in range(2)]
    drawn = [tuple(target.get(30)["observations"][:, 0].tolist()) for _ in range(3)]
    drawn += [tuple(target.get_tensor_batch(30)["observations"][:, 0].tolist()) for _ in range(3)]
    assert all(len(set(batch)) == 30 and set(batch) <= set(steps) for batch in drawn)
    assert len(set(drawn)) == 6
    for batch in (target.get_tensor_batch(), target.get_tensor_batch(80)):
        batch["observations"].zero_()
    target.get()["observations"][:] = 0
    assert target.get_tensor_batch()["observations"][:, 0].tolist() == steps


def test_an_empty_buffer_gives_empty_batches() -> None:
    assert make_buffer(2).get() == {}
    assert make_buffer(2).get_tensor_batch().is_empty()


@pytest.mark.parametrize(
    ("method", "message"),
    [("get", "larger than buffer size, so that all 2"), ("get_tensor_batch", "larger than buffer_size, so that all 2")],
)
def test_a_batch_larger_than_the_buffer_is_all_of_it_with_a_warning(method: str, message: str) -> None:
    target = make_buffer(2, 2)
    add_steps(target, np.zeros((1, 2)))
    with pytest.warns(UserWarning, match=message):
        batch = getattr(target, method)(3)
    assert batch["observations"][:, 0].tolist() == [0, 1]


def prepared_slices(target: RolloutBuffer) -> list[list[int]]:
    target.prepare_sequence_tensors()
    assert target.unpadded_slices is not None
    return [part.tolist() for part in target.unpadded_slices]


@pytest.mark.parametrize(
    ("length", "kind", "starts"),
    [
        (10, BPTTSequenceType.CHUNKED, [0, 4]),
        (10, BPTTSequenceType.FIFTY_PERCENT_OVERLAPPING, [0, 2, 4, 6]),
        (10, BPTTSequenceType.MAXIMUM, range(7)),
        (7, BPTTSequenceType.CHUNKED, [0]),
        (7, BPTTSequenceType.FIFTY_PERCENT_OVERLAPPING, [0, 2]),
    ],
)
def test_an_episode_is_cut_as_the_sequence_type_says(length: int, kind: BPTTSequenceType, starts: Any) -> None:
    target = make_recurrent_buffer(length, max_seq_len=4, bptt_sequence_type=kind)
    add_steps(target, np.zeros((length, 1)))
    assert prepared_slices(target) == [list(range(start, start + 4)) for start in starts]


def test_the_prepared_tensors_of_two_environments() -> None:
    target = make_recurrent_buffer(5, 2, max_seq_len=3)
    add_steps(target, [[0, 0], [1, 0], [0, 0], [0, 0], [0, 0]])
    padded = target.prepare_sequence_tensors()
    assert padded.batch_size == (3, 3)
    assert [part.tolist() for part in target.unpadded_slices or ()] == [[0, 2], [4, 6, 8], [1, 3, 5]]
    assert padded["pad_mask"].int().tolist() == [[1, 1, 0], [1, 1, 1], [1, 1, 1]]
    assert padded["observations"][0, :, 0].tolist() == [0, 100, 0]
    assert padded["actions"][:, :, 0].tolist() == [[0, 1, 0], [2, 0, 1], [0, 1, 2]]
    hidden: Any = padded.get_non_tensor("initial_hidden_states")
    assert hidden["actor"].shape == (3, 2, 3)
    assert hidden["actor"][:, 1, 2].tolist() == [0, 200, 1]
    assert set(padded.keys()) == {"observations", "actions", "pad_mask", "initial_hidden_states"}
    assert target.padded_data is not None
    assert target.padded_data.batch_size == (9,)
    assert target.unpadded_data is not None
    assert set(target.unpadded_data.keys()) == {"log_probs", "advantages", "values", "returns"}
    assert target.unpadded_data.batch_size == (10,)


@given(st.data())
def test_sequences_match_the_written_out_ones_also_after_a_wrap(data: st.DataObject) -> None:
    capacity, envs = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3))
    steps = data.draw(st.integers(1, 2 * capacity))
    length, kind = data.draw(st.none() | st.integers(1, 5)), data.draw(st.sampled_from(KINDS))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    done = rng.random((steps, envs)) < data.draw(st.sampled_from([0.0, 0.2, 0.6]))
    target = make_recurrent_buffer(capacity, envs, max_seq_len=length, bptt_sequence_type=kind, wrap_at_capacity=True)
    add_steps(target, done)
    first = max(steps - capacity, 0)
    expected = reference.sequences(done[first:].tolist(), length, kind.value)
    assert prepared_slices(target) == expected
    assert target.num_sequences == len(expected)
    longest = max(map(len, expected))
    assert target.max_sequence_length == longest

    # Numbers show time and environment: each sequence must be complete, come once, and have its own hidden state.
    numbers = [[100.0 * (first + i // envs) + i % envs for i in part] for part in expected]
    actual = []
    for padded, unpadded in target.get_minibatch_sequences(data.draw(st.integers(1, len(expected)))):
        count = len(padded) // longest
        obs, mask = (padded[key].view(count, longest, -1) for key in ("observations", "pad_mask"))
        assert not obs[~mask.squeeze(-1)].any()
        hidden: Any = padded.get_non_tensor("initial_hidden_states")
        for i in range(count):
            actual.append(obs[i, mask[i, :, 0], 0].tolist())
            assert hidden["actor"][i].flatten().tolist() == [actual[-1][0]] * 6
            assert hidden["critic"][i].flatten().tolist() == [actual[-1][0]] * 4
        assert torch.allclose(unpadded["values"] * 3, padded["observations"][padded["pad_mask"]][:, 0])
    assert sorted(actual) == sorted(numbers)


def test_an_epoch_shuffles_whole_sequences_and_ends_with_the_remainder() -> None:
    target = make_recurrent_buffer(50, 1, max_seq_len=2)
    add_steps(target, np.zeros((50, 1)))
    target.prepare_sequence_tensors()
    epochs = [list(target.get_minibatch_sequences(10)) for _ in range(2)]
    assert [[len(padded) for padded, _ in epoch] for epoch in epochs] == [[20, 20, 10]] * 2
    orders = [torch.cat([unpadded["values"] for _, unpadded in epoch]).tolist() for epoch in epochs]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


def test_action_masks_and_nested_observations_are_padded_too() -> None:
    space = spaces.Dict(a=spaces.Box(0, 9, (1,)), b=spaces.Dict(c=spaces.Discrete(9)))
    options: dict[str, Any] = {"recurrent": True, "hidden_state_architecture": {"h": (1, 1, 2)}}
    target = RolloutBuffer(3, space, spaces.Discrete(2), **options)
    for t, done in enumerate([False, True, False]):
        obs = {"a": np.array([t + 1.0]), "b": {"c": t + 1}}
        target.add(obs, 0, 0.0, done, 0.0, 0.0, action_mask=[True, t > 0])
    padded = target.prepare_sequence_tensors()
    assert padded["observations", "a"].squeeze(-1).tolist() == [[1, 2], [3, 0]]
    assert padded["observations", "b", "c"].squeeze(-1).tolist() == [[1, 2], [3, 0]]
    assert padded["action_masks"].int().tolist() == [[[1, 0], [1, 1]], [[1, 1], [0, 0]]]


def test_prepared_sequences_are_a_copy() -> None:
    target = make_recurrent_buffer(2, 1)
    add_steps(target, np.zeros((2, 1)))
    target.prepare_sequence_tensors()
    target.buffer["values"].fill_(99)
    target.buffer["observations"].fill_(99)
    ((padded, unpadded),) = target.get_minibatch_sequences(1)
    assert padded["observations"][:, 0].tolist() == [0, 100]
    assert unpadded["values"].tolist() == pytest.approx([0, 100 / 3])


def test_sequences_need_a_recurrent_buffer_and_steps_and_preparation() -> None:
    with pytest.raises(ValueError, match="only supported when recurrent=True"):
        make_buffer(2).prepare_sequence_tensors()
    with pytest.raises(ValueError, match="^Attempting to prepare sequences with empty buffer: add steps"):
        make_recurrent_buffer(2).prepare_sequence_tensors()
    with pytest.raises(ValueError, match="^Attempting to fetch minibatches before preparing sequences: call"):
        next(make_recurrent_buffer(2).get_minibatch_sequences(2))
    target: Any = make_recurrent_buffer(2, bptt_sequence_type="backwards")
    add_steps(target, np.zeros((2, 1)))
    with pytest.raises(NotImplementedError, match="unrecognized sequence type .*backwards.*: pass one of CHUNKED"):
        target.prepare_sequence_tensors()


def test_a_minibatch_larger_than_all_sequences_is_all_with_a_warning() -> None:
    target = make_recurrent_buffer(4, max_seq_len=2)
    add_steps(target, np.zeros((4, 1)))
    target.prepare_sequence_tensors()
    with pytest.warns(UserWarning, match="larger than the number of sequences; all 2 are one batch"):
        ((padded, _),) = target.get_minibatch_sequences(3)
    assert padded.batch_size == (4,)


def draws(target: RolloutBuffer) -> list[Any]:
    flat = [target.get(9)["values"].tolist(), target.get_tensor_batch(9)["values"].tolist()]
    return flat + [unpadded["values"].tolist() for _, unpadded in target.get_minibatch_sequences(3)]


@pytest.mark.parametrize("masked", [False, True])
def test_the_state_of_agilerls_own_buffer_is_taken(masked: bool) -> None:
    theirs = {
        "observations": torch.arange(12.0).view(3, 2, 2), "next_observations": torch.zeros(3, 2, 2),
        "actions": torch.ones(3, 2, 1), "rewards": torch.arange(6.0).view(3, 2), "values": torch.zeros(3, 2),
        "log_probs": torch.zeros(3, 2), "advantages": torch.zeros(3, 2), "returns": torch.zeros(3, 2),
        "dones": torch.zeros(3, 2, dtype=torch.bool), "hidden_states": {"actor": torch.ones(3, 2, 1, 4)},
    } | ({"action_masks": torch.ones(3, 2, 3)} if masked else {})  # fmt: skip
    state = {
        "capacity": 3, "observation_space": BOX, "action_space": spaces.Discrete(3), "num_envs": 2, "device": "cpu",
        "gae_lambda": 0.95, "gamma": 0.99, "recurrent": True, "hidden_state_architecture": {"actor": (1, 2, 4)},
        "use_gae": True, "wrap_at_capacity": False, "max_seq_len": 2, "bptt_sequence_type": BPTTSequenceType.CHUNKED,
        "pos": 2, "full": False, "buffer": TensorDict(theirs, batch_size=[3, 2]),
    }  # fmt: skip
    buffer = RolloutBuffer.__new__(RolloutBuffer)
    buffer.__setstate__(state)
    assert buffer.size() == 4
    assert buffer.get()["rewards"].tolist() == [0, 1, 2, 3]
    assert ("action_masks" in buffer.get()) == masked
    buffer.add(torch.full((2, 2), 9.0), torch.zeros(2), torch.full((2,), 7.0), [False] * 2, [0.0] * 2, [0.0] * 2)
    assert buffer.get()["rewards"].tolist() == [0, 1, 2, 3, 7, 7]
    buffer.compute_returns_and_advantages(torch.zeros(2), torch.zeros(2))
    assert buffer.prepare_sequence_tensors()["observations"].shape[-1] == 2
    assert next(buffer.get_minibatch_sequences(1))[0]["initial_hidden_states"]["actor"].eq(1).all()


def test_a_seed_repeats_all_draws_also_in_a_pickled_copy() -> None:
    actual = []
    before = torch.get_rng_state()
    for seed in (1, 1, 2):
        target = make_recurrent_buffer(20, 2, max_seq_len=2, seed=seed)
        add_steps(target, np.zeros((20, 2)))
        target.prepare_sequence_tensors()
        actual.append(draws(target))
        twin = pickle.loads(pickle.dumps(target))
        assert draws(twin) == draws(target)
    assert actual[0] == actual[1] != actual[2]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_state_without_its_memory_starts_empty_with_a_warning() -> None:
    target = make_buffer(3, 2)
    add_steps(target, np.zeros((2, 2)))
    state = target.__getstate__()
    restored = RolloutBuffer.__new__(RolloutBuffer)
    with pytest.warns(UserWarning, match="no TensorDict of steps"):
        restored.__setstate__(state | {"buffer": None})
    assert restored.size() == 0
    with pytest.warns(UserWarning, match=re.escape("expected batch_size torch.Size([3, 2])")):
        restored.__setstate__(state | {"buffer": target.buffer[:2]})
    assert restored.size() == 0
    add_steps(restored, np.zeros((3, 2)))
    assert restored.size() == 6
    del state["observation_space"], state["buffer"]
    spaces_missing = "observation or action space is missing"
    with pytest.warns(UserWarning, match=spaces_missing), pytest.warns(UserWarning, match="no TensorDict of steps"):
        RolloutBuffer.__new__(RolloutBuffer).__setstate__(state)


def test_a_lone_number_of_one_environment_fills_an_observation_with_a_warning() -> None:
    target = RolloutBuffer(2, spaces.MultiBinary(4), spaces.Discrete(2))
    with pytest.warns(rl.DataWarning, match=r"obs: expected shape \(1, 4\), got one number. It fills them all"):
        target.add(torch.ones(1), 0, 1.0, False, 0.5, -0.5)
    assert target.buffer["observations"][0].tolist() == [[1, 1, 1, 1]]
    with pytest.raises(ValueError, match=r"obs: expected shape \(1, 4\), got \(2,\)"):
        target.add(torch.ones(2), 0, 1.0, False, 0.5, -0.5)
