"""Tests of `Window`: every backend reads the same bits as a slow reference."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import relive as rl
from relive import kernels
from relive.errors import SchemaError
from relive.storage import Memory
from tests.conftest import BACKENDS
from tests.faults.digest import digest
from tests.reference import windows as reference
from tests.replay.views.lives import RecordedReplay, record_replay

FIELDS = ("obs", "next_obs", "action", "reward", "terminated", "truncated", "hidden", "word")
OFFSETS = st.lists(st.integers(-9, 9), min_size=1, max_size=5)
OFFSETS_BY_FIELD = st.dictionaries(st.sampled_from(FIELDS), OFFSETS, min_size=1, max_size=4)
OFFSETS_IN_OBS = st.dictionaries(st.sampled_from(["plain", "frames"]), OFFSETS, min_size=1)
VIEWS = st.sampled_from([rl.Transition(), rl.NStep(1, 0.5), rl.NStep(4, 0.9), rl.NStep(40, 1.0)])


def read_by_reference(recorded: RecordedReplay, window: rl.Window) -> dict[tuple[str, ...], np.ndarray]:
    """Return the batch of all rows, read by the slow reference."""
    n, gamma = (window.view.n, window.view.gamma) if isinstance(window.view, rl.NStep) else (0, 0.0)
    rows = [
        reference.read(recorded.columns[env], row, dict(window.offsets), window.pad, n, gamma)
        for _, env, row in recorded.rows()
    ]
    batch = {path: np.stack([row[path] for row in rows]) for path in rows[0]}
    return batch | {("index",): np.array([index for index, _, _ in recorded.rows()])}


def require_equal(batch: TensorDict, expected_leaves: dict[tuple[str, ...], np.ndarray], name: str) -> None:
    keys = [key if isinstance(key, tuple) else (key,) for key in batch.keys(True, True)]
    assert set(keys) == set(expected_leaves), name
    for path in keys:
        found, leaf = batch.get(path), expected_leaves[path]
        assert found.is_contiguous()
        assert found.shape == leaf.shape, (name, path)
        assert found.numpy().dtype == leaf.dtype, (name, path)
        assert found.numpy().tobytes() == leaf.tobytes(), (name, path)


@settings(max_examples=100, deadline=None)
@given(
    num_envs=st.sampled_from([None, 1, 3]),
    seed=st.integers(0, 3),
    autoreset=st.sampled_from(["SAME_STEP", "NEXT_STEP"]),
    named=OFFSETS_BY_FIELD,
    inside=st.none() | OFFSETS_IN_OBS,
    view=VIEWS,
    pad=st.sampled_from(["repeat", "zero"]),
)
def test_every_backend_reads_what_the_reference_reads(
    num_envs: int | None, seed: int, autoreset: str, named: dict[str, Any], inside: Any, view: Any, pad: Any
) -> None:
    window = rl.Window(view=view, pad=pad, **(named if inside is None else {**named, "obs": inside}))
    expected_leaves = read_by_reference(record_replay("torch", num_envs, seed, autoreset), window)
    for name, backend in BACKENDS.items():
        replay = record_replay(name, num_envs, seed, autoreset).replay
        with backend():
            require_equal(replay.read(replay.ids(), window), expected_leaves, name)


def make_chain(**options: Any) -> rl.ReplayBuffer:
    """Make episodes of 5 steps; action and reward are the step's number t, a final observation is t + 0.5."""
    replay = rl.ReplayBuffer(100, obs=1, action=(), seed=0, **options)
    for t in range(14):
        replay.add([t], t, t, terminated=t % 5 == 4, truncated=False, next_obs=[t + 0.5 if t % 5 == 4 else t + 1])
    return replay


def read_chain(steps: list[int], window: rl.Window) -> TensorDict:
    replay = make_chain()
    return replay.read(replay.ids()[steps], window)


def test_a_chunk_for_q_learning_by_hand(backend: str) -> None:
    view = rl.Window(action=range(3), view=rl.NStep(3, gamma=0.5))
    batch = read_chain([2, 3, 13], view)
    assert batch["action"].tolist() == [[2, 3, 4], [3, 4, 4], [13, 13, 13]]
    assert batch["action_mask"].tolist() == [[True, True, True], [True, True, False], [True, False, False]]
    assert batch["reward"].tolist() == [2 + 1.5 + 1, 3 + 2, 13]
    assert batch["discount"].tolist() == [0.125, 0.25, 0.5]
    assert batch["next_obs"].tolist() == [[4.5], [4.5], [14]]
    assert batch["terminated"].tolist() == [True, True, False]
    assert batch["obs"].tolist() == [[2], [3], [13]]


def test_the_final_observation_is_the_last_one_of_an_episode(backend: str) -> None:
    view = rl.Window(obs=(-1, 0, 1, 2), next_obs=(-1, 0), reward=(1,))
    batch = read_chain([0, 4, 13], view)
    assert batch["obs"].squeeze(-1).tolist() == [[0, 0, 1, 2], [3, 4, 4.5, 4.5], [12, 13, 14, 14]]
    assert batch["obs_mask"].tolist() == [
        [False, True, True, True],
        [True, True, True, False],
        [True, True, True, False],
    ]
    assert batch["next_obs"].squeeze(-1).tolist() == [[0, 1], [4, 4.5], [13, 14]]
    assert batch["next_obs_mask"].all()
    assert batch["reward"].tolist() == [[1], [4], [13]]
    assert batch["reward_mask"].tolist() == [[True], [False], [False]]


def test_next_observations_count_from_where_the_view_leads(backend: str) -> None:
    batch = read_chain([0, 3], rl.Window(next_obs=(-1, 0, 1), view=rl.NStep(3, 0.9)))
    assert batch["next_obs"].squeeze(-1).tolist() == [[2, 3, 4], [4, 4.5, 4.5]]
    assert batch["next_obs_mask"].tolist() == [[True, True, True], [True, True, False]]


def test_padding_with_zeros(backend: str) -> None:
    batch = read_chain([3], rl.Window(obs=(-9, 9), action=range(4), pad="zero"))
    assert batch["obs"].squeeze(-1).tolist() == [[0, 0]]
    assert batch["action"].tolist() == [[3, 4, 0, 0]]


def test_offsets_far_away_are_outside(backend: str) -> None:
    far = 2**31 - 1
    batch = read_chain([2], rl.Window(action=(-far, far), obs=(far,)))
    assert batch["action"].tolist() == [[0, 4]]
    assert batch["obs"].tolist() == [[[4.5]]]
    assert not batch["action_mask"].any()
    assert not batch["obs_mask"].any()


@pytest.mark.parametrize("sampler", [rl.Uniform(), rl.Prioritized(), rl.WithoutReplacement()])
def test_every_sampler_draws_windows(backend: str, sampler: Any) -> None:
    replay = make_chain(sampler=sampler)
    view = rl.Window(obs=(-1, 0), action=range(3), view=rl.NStep(3, 0.9))
    batch = replay.sample(4, view)
    again = replay.read(batch["index"], view)
    assert ("weight" in batch.keys()) == isinstance(sampler, rl.Prioritized)
    for path in again.keys(True, True):
        assert torch.equal(batch[path], again[path]), path
    out = replay.sample(4, view)
    assert replay.sample(4, view, out=out) is out
    assert torch.equal(out["action"], replay.read(out["index"], view)["action"])


def test_rewards_of_several_agents_are_each_summed_or_read(backend: str) -> None:
    replay = rl.ReplayBuffer(20, obs=1, action=(), reward={"a": (), "b": ()}, seed=0)
    for t in range(4):
        replay.add([t], t, {"a": t, "b": 10 * t}, terminated=t == 3, truncated=False, next_obs=[t + 1])
    batch = replay.read([1, 2], rl.Window(reward={"b": (0, 1, 2)}, view=rl.NStep(3, 0.5)))
    assert batch["reward", "a"].tolist() == [1 + 1 + 0.75, 2 + 1.5]
    assert batch["reward", "b"].tolist() == [[10, 20, 30], [20, 30, 30]]
    assert batch["reward_mask", "b"].tolist() == [[True, True, True], [True, True, False]]
    assert batch["discount"].tolist() == [0.125, 0.25]
    batch = replay.read([1, 2], rl.Window(reward={"a": (1,)}, view=rl.NStep(3, 0.5)))
    assert batch["reward", "a"].tolist() == [[2], [3]]
    assert batch["reward", "b"].tolist() == [10 + 10 + 7.5, 20 + 15]


@pytest.mark.skipif(not hasattr(kernels.native_core(), "ProcessLock"), reason="disk memory needs Linux and a compiler")
@pytest.mark.parametrize("kind", ["disk", "shared"])
def test_windows_of_other_memory_are_those_of_memory(tmp_path: Any, kind: str) -> None:
    window = rl.Window(obs=(-2, 0, 2), action=range(4), hidden=(-1,), view=rl.NStep(3, 0.9))
    place = Memory.disk(tmp_path / "replay") if kind == "disk" else Memory.shared()
    recorded = RecordedReplay(3, 5, "SAME_STEP", place)
    require_equal(recorded.replay.read(recorded.replay.ids(), window), read_by_reference(recorded, window), kind)
    recorded.replay.close()


def test_windows_are_the_same_after_a_checkpoint(tmp_path: Any) -> None:
    window = rl.Window(obs=(-1, 0), action=range(3))
    recorded = RecordedReplay(2, 7, "SAME_STEP")
    recorded.replay.save(tmp_path)
    again = rl.load(tmp_path)
    assert isinstance(again, rl.ReplayBuffer)
    require_equal(again.read(again.ids(), window), read_by_reference(recorded, window), "loaded")
    assert torch.equal(recorded.replay.sample(16, window)["index"], again.sample(16, window)["index"])


def test_prefetching_and_mixtures_take_windows() -> None:
    window = rl.Window(obs=(-1, 0), action=range(3))
    replay, other = make_chain(), make_chain()
    with rl.prefetch(replay, 8, window) as batches:
        batch = next(batches)
    assert torch.equal(batch["action"], replay.read(batch["index"], window)["action"])
    mixed = rl.Mixture({"a": replay, "b": other}, (1, 1)).sample(8, window)
    assert mixed["action"].shape == (8, 3)
    assert torch.equal(mixed["action"][:, 0], mixed["obs"][:, 1, 0])


def relabel(achieved: torch.Tensor, goal: torch.Tensor, rows: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
    hit = (achieved == goal).squeeze(-1)
    return hit.float(), hit


def make_walk(seed: int) -> rl.ReplayBuffer:
    """Make episodes of 6 steps towards a goal that is never reached."""
    replay = rl.ReplayBuffer(60, obs={"at": 1, "goal": 1}, action=(), seed=seed)
    for t in range(20):
        now, then = ({"at": [x], "goal": [99]} for x in (t, t + 1))
        replay.add(now, t, 0, terminated=False, truncated=t % 6 == 5, next_obs=then)
    return replay


@pytest.mark.parametrize("view", [rl.Transition(), rl.NStep(3, 0.5)])
@pytest.mark.parametrize("pad", ["repeat", "zero"])
def test_goals_that_nobody_changed_leave_windows_as_they_are(backend: str, view: Any, pad: Any) -> None:
    window = rl.Window(obs=(-1, 0, 1), action=range(4), next_obs={"at": (0, 1)}, view=view, pad=pad)
    replay = make_walk(0)
    plain = replay.read(replay.ids(), window)
    found = replay.read(replay.ids(), rl.Hindsight("goal", "at", relabel, ratio=0.0, view=window))
    assert set(found.keys(True, True)) == set(plain.keys(True, True))
    for path in plain.keys(True, True):
        assert torch.equal(found[path], plain[path]), path


def test_a_chunk_ends_where_its_new_goal_is_reached(backend: str) -> None:
    window = rl.Window(obs=(-1, 0, 1, 2), action=range(4), view=rl.NStep(4, 0.5))
    replay = make_walk(3)
    batch = replay.read(replay.ids(), rl.Hindsight("goal", "at", relabel, ratio=1.0, view=window))
    start, goal = batch["obs", "at"][:, 1, 0], batch["obs", "goal"]
    # A row has one goal, also in its final observation.
    assert bool((goal == goal[:, :1]).all())
    assert torch.equal(goal[:, 0], batch["next_obs", "goal"])
    steps_to_goal = (goal[:, 0, 0] - start).long()
    k, hit = steps_to_goal.clamp(max=4), steps_to_goal <= 4
    # Goals are in the same episode, so nothing but its goal ends a chunk.
    assert torch.equal(batch["action_mask"].sum(1), k)
    assert torch.equal(batch["terminated"], hit)
    assert torch.equal(batch["reward"], torch.where(hit, 0.5 ** (steps_to_goal - 1).float(), torch.zeros(())))
    assert torch.equal(batch["discount"], 0.5 ** k.float())
    assert torch.equal(batch["next_obs", "at"][:, 0], start + k)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "Window: expected offsets of at least one field, got no field"),
        ({"action": 3}, "Window.action: expected several offsets, got 3"),
        ({"action": "01"}, "Window.action: expected several offsets, got '01'"),
        ({"action": ()}, "Window.action: expected 1 to 65536 offsets, got 0"),
        ({"action": range(2**40)}, "Window.action: expected at most 65536 offsets"),
        ({"action": (0, 1.5)}, "Window.action: expected offsets that are ints below 2^31, got 1.5"),
        ({"action": (True,)}, "expected offsets that are ints below 2^31, got True"),
        ({"action": (2**31,)}, "expected offsets that are ints below 2^31, got 2147483648"),
        ({"obs": {}}, "Window.obs: expected offsets by name, got {}"),
        ({"action": (0,), "pad": "edge"}, "Window.pad: expected \"repeat\" or \"zero\", got 'edge'"),
        ({"action": (0,), "view": rl.Sequence(3)}, "Window.view: expected Transition() or NStep(n, gamma), got Seq"),
        ({"action": (0,), "view": rl.NStep}, "got the class NStep"),
    ],
)  # fmt: skip
def test_arguments_that_are_no_windows(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError) as error:
        rl.Window(**arguments)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"actions": (0,)}, "Pass it as action"),
        ({"index": (0,)}, "index: expected a declared field"),
        ({"obs": {"lidar": (0,)}}, "Window.obs.lidar: expected a part of obs (camera, state), got lidar"),
        ({"action": {"arm": (0,)}}, "Window.action.arm: expected a part of action"),
    ],
)  # fmt: skip
def test_fields_that_a_buffer_does_not_have(arguments: dict[str, Any], message: str) -> None:
    replay = rl.ReplayBuffer(10, obs={"camera": 1, "state": 1}, action=(), seed=0)
    before = digest(replay)
    with pytest.raises(SchemaError) as error:
        replay.sample(2, rl.Window(**arguments))
    assert message in str(error.value)
    assert digest(replay) == before


def test_a_mask_that_would_hide_a_field_is_refused() -> None:
    replay = rl.ReplayBuffer(10, obs=1, action=(), extra={"action_mask": 2}, seed=0)
    with pytest.raises(SchemaError, match="Window.action: expected the name action_mask for the mask of action"):
        replay.sample(2, rl.Window(action=(0, 1)))


def test_rows_in_no_order_have_no_windows() -> None:
    replay = rl.ReplayBuffer(10, obs=1, action=(), next_obs="stored", seed=0)
    replay.add([0], 0, 0, terminated=False, truncated=False, next_obs=[1])
    with pytest.raises(SchemaError, match="Window: expected rows in time order"):
        replay.sample(2, rl.Window(action=(0, 1)))


def test_seconds_are_frames() -> None:
    fps = 30
    window = rl.Window.from_seconds(
        fps, obs={"camera": [0.0], "state": [-1 / 30, 0]}, action=[i / fps for i in range(50)]
    )
    assert window == rl.Window(obs={"camera": (0,), "state": (-1, 0)}, action=range(50))
    assert rl.Window.from_seconds(10, obs=np.array([-0.1, 0.0]), pad="zero") == rl.Window(obs=(-1, 0), pad="zero")


@pytest.mark.parametrize(
    ("fps", "seconds", "message"),
    [
        (10, [0.05], "expected times that are multiples of 1/10 s, got 0.05. Pass whole frames, for example 0 or 0.1."),
        (10, [float("nan")], "obs: expected times in seconds, got nan"),
        (10, ["0"], "obs: expected times in seconds, got '0'"),
        (10, 0.1, "obs: expected several times, got 0.1"),
        (0, [0.0], "fps: expected a positive number, got 0"),
        (float("inf"), [0.0], "fps: expected a positive number, got inf"),
    ],
)  # fmt: skip
def test_times_that_are_no_frames(fps: float, seconds: Any, message: str) -> None:
    with pytest.raises(SchemaError) as error:
        rl.Window.from_seconds(fps, obs=seconds)
    assert message in str(error.value)


def test_windows_are_values() -> None:
    window = rl.Window(obs={"camera": [0]}, action=range(3), view=rl.NStep(3, 0.9), pad="zero")
    assert repr(window) == "Window(obs={'camera': (0,)}, action=range(0, 3), view=NStep(n=3, gamma=0.9), pad='zero')"
    assert eval(repr(window), {"Window": rl.Window, "NStep": rl.NStep}) == window
    assert pickle.loads(pickle.dumps(window)) == window
    assert hash(window) == hash(rl.Window(obs={"camera": (0,)}, action=(0, 1, 2), view=rl.NStep(3, 0.9), pad="zero"))
    assert rl.Window(action=(2, 0, 0)).offsets == ((("action",), (2, 0, 0)),)
