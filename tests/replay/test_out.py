"""Tests of `out`: what does not fit is refused before rows are drawn, and a short batch fills the first rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

import relive as rl
from tests.faults.digest import digest

HINDSIGHT = rl.Hindsight("goal", "at", lambda achieved, goal, rows: (rows["reward"], rows["terminated"]))


def make_buffer(sampler: rl.Sampler | None = None, rows: int = 10) -> rl.ReplayBuffer:
    replay = rl.ReplayBuffer(100, obs={"goal": 1, "at": 1}, action=(), sampler=sampler, seed=0)
    for t in range(rows):
        obs, after = ({"goal": [9.0], "at": [float(t + k)]} for k in (0, 1))
        replay.add(obs, 0.0, float(t), False, False, after)
    return replay


def make_mixture(sampler: rl.Sampler | None = None) -> rl.Mixture:
    return rl.Mixture({"a": make_buffer(sampler)}, [1])


class WeightedEpochs(rl.Sampler):
    """A user's sampler of epochs with weights."""

    returns_weights = may_return_fewer = True
    independent = False

    def on_bind(self) -> None:
        self.at = 0

    def sample(self, count: int) -> Any:
        slots = self.storage.stored()[self.at : self.at + count]
        self.at += count
        return slots, 1.0 + slots.float()


@pytest.mark.parametrize("view", [None, HINDSIGHT], ids=["transitions", "hindsight"])
@pytest.mark.parametrize("make", [make_buffer, make_mixture])
def test_the_rest_of_an_epoch_is_in_the_first_rows(make: Any, view: Any, backend: str) -> None:
    one, twin = (make(rl.WithoutReplacement()) for _ in range(2))
    out = one.sample(6, view)
    twin.sample(6, view)
    rest, expected = one.sample(6, view, out=out), twin.sample(6, view)
    assert len(rest) == 4
    assert (rest == expected).all()
    assert rest["reward"].data_ptr() == out["reward"].data_ptr()


def test_the_rest_of_an_epoch_with_weights(backend: str) -> None:
    # The last batches have 2 rows and 1 row.
    for count in (4, 9):
        one, twin = make_buffer(WeightedEpochs()), make_buffer(WeightedEpochs())
        out = one.sample(count)
        twin.sample(count)
        while one.sampler.at + count <= 10:  # type: ignore[attr-defined]
            one.sample(count, out=out)
            twin.sample(count)
        rest, expected = one.sample(count, out=out), twin.sample(count)
        assert (rest == expected).all()


WRONG: dict[str, Callable[[TensorDict], Any]] = {
    "another dtype": lambda out: out.clone().set("reward", out["reward"].double()),
    "another shape": lambda out: out.clone().set("reward", torch.zeros(3, 1)),
    "fewer rows": lambda out: out[:2],
    "a field less": lambda out: out.exclude("action"),
    "no index": lambda out: out.exclude("index"),
    "no batch size": lambda out: TensorDict(out.to_dict(), batch_size=[]),
    "a lazy stack": lambda out: LazyStackedTensorDict(*[out[i].clone() for i in range(len(out))]),
}
VIEWS = [None, rl.NStep(2, 0.9), rl.Window(reward=(-1, 0), next_obs=(0,), view=rl.NStep(2, 0.9)), HINDSIGHT]


@pytest.mark.parametrize("view", VIEWS, ids=["transitions", "n-step", "window", "hindsight"])
@pytest.mark.parametrize("sampler", [rl.Prioritized(), rl.WithoutReplacement(), rl.Counted()], ids=str)
@pytest.mark.parametrize("make", [make_buffer, make_mixture])
def test_an_out_that_does_not_fit_draws_nothing(make: Any, view: Any, sampler: Any, backend: str) -> None:
    source = make(sampler)
    out = source.sample(3, view)
    before = digest(source)
    for name, change in WRONG.items():
        with pytest.raises(rl.SchemaError, match="^out"):
            source.sample(3, view, out=change(out))
        assert digest(source) == before, name
    assert source.sample(3, view, out=out) is out


@pytest.mark.parametrize("sampler", [rl.Uniform(), rl.Prioritized()])
def test_a_batch_of_inference_mode_is_filled(sampler: rl.Sampler, backend: str) -> None:
    one, twin = make_buffer(sampler), make_buffer(sampler)
    with torch.inference_mode():
        out = one.sample(4)
    twin.sample(4)
    assert (one.sample(4, out=out) == twin.sample(4)).all()


def test_a_batch_of_relabelled_sequences_fits_the_next_one(backend: str) -> None:
    view = rl.Hindsight("goal", "at", HINDSIGHT.fn, view=rl.Sequence(3, burn_in=1))
    replay = rl.ReplayBuffer(50, obs={"goal": 1, "at": 1}, action=(), extra={"state": rl.Carry(2)}, seed=0)
    for t in range(12):
        obs, after = ({"goal": [9.0], "at": [float(t + k)]} for k in (0, 1))
        replay.add(obs, 0.0, 0.0, False, False, after, state=[t, t])
    out = replay.sample(4, view)
    assert replay.sample(4, view, out=out) is out


def test_a_mixture_that_is_not_ready_draws_nothing() -> None:
    mixture = rl.Mixture({"a": make_buffer(), "b": make_buffer(rl.WithoutReplacement(), 3)}, [1, 1])
    first = mixture.buffers["a"]
    before = digest(first)
    with pytest.raises(rl.NotReadyError):
        mixture.sample(20)
    assert digest(first) == before


def _with(out: TensorDict, name: str, leaf: torch.Tensor) -> TensorDict:
    return TensorDict({**out, name: leaf}, batch_size=out.batch_size)


@dataclass(frozen=True)
class Doubled:
    """A user's view with doubled rewards."""

    def plan(self, schema: Any) -> Any:
        return rl.Transition().plan(schema)

    def finish(self, batch: Any, context: Any) -> Any:
        return batch | {("reward",): 2 * batch[("reward",)]}


@pytest.mark.parametrize("view", [None, HINDSIGHT, Doubled()], ids=["transitions", "hindsight", "doubled"])
@pytest.mark.parametrize("make", [make_buffer, make_mixture])
def test_memory_of_the_buffer_is_refused_before_the_draw(make: Any, view: Any, backend: str) -> None:
    source = make()
    replay = source if make is make_buffer else source.buffers["a"]
    out = source.sample(4, view)
    stored = replay.columns["reward"][:4, 0]
    before = digest(source)
    with pytest.raises(rl.SchemaError, match=r"^out\.reward: expected memory outside the buffer"):
        source.sample(4, view, out=_with(out, "reward", stored))
    assert digest(source) == before


def test_memory_of_a_state_dict_is_refused(backend: str) -> None:
    replay = make_buffer(rl.Counted())
    out, saved = replay.sample(4), replay.state_dict()
    rewards = saved["rows"]["column3"]
    assert rewards.data_ptr() == replay.columns["reward"].data_ptr()
    leaves = {"reward": rewards[:4, 0], "index": saved["arrays"]["sampler.drawn"][:4]}
    before = digest(replay), replay[replay.ids()]
    for name, leaf in leaves.items():
        with pytest.raises(rl.SchemaError, match=rf"^out\.{name}: expected memory outside the buffer"):
            replay.sample(4, out=_with(out, name, leaf))
    assert digest(replay) == before[0]
    assert (replay[replay.ids()] == before[1]).all()


@pytest.mark.parametrize("sampler", [rl.Prioritized(), rl.Counted(rl.Prioritized())])
def test_memory_of_the_priorities_is_refused(sampler: rl.Sampler, backend: str) -> None:
    replay = make_buffer(sampler)
    out = replay.sample(2)
    priorities = replay.state_dict()["arrays"]["sampler.mass"].view(torch.int64)[:2]
    with pytest.raises(rl.SchemaError, match=r"^out\.index: expected memory outside the buffer"):
        replay.sample(2, out=_with(out, "index", priorities))
    replay.check()


def test_the_state_of_a_users_sampler_is_not_made_for_a_batch(backend: str) -> None:
    class Stateful(rl.Sampler):
        def sample(self, count: int) -> Any:
            return self.storage.stored()[:count], None

        def state(self) -> Any:
            raise AssertionError

    for sampler in (Stateful(), rl.Counted(Stateful())):
        replay = make_buffer(sampler)
        out = replay.sample(3)
        assert replay.sample(3, out=out) is out


@pytest.mark.parametrize("view", [None, HINDSIGHT], ids=["transitions", "hindsight"])
def test_leaves_that_overlap_each_other_are_refused_before_the_draw(view: Any, backend: str) -> None:
    replay = make_buffer()
    out = replay.sample(4, view)
    memory = torch.zeros(6)
    out = _with(_with(out, "reward", memory[:4]), "action", memory[2:])
    before = digest(replay)
    with pytest.raises(rl.SchemaError, match=r"^out: expected leaves with memory of their own"):
        replay.sample(4, view, out=out)
    assert digest(replay) == before


def test_leaves_of_a_minibatch_that_overlap_each_other_are_refused(backend: str) -> None:
    rollout = rl.RolloutBuffer(4, obs=(), action=(), num_envs=2)
    for _ in range(4):
        rollout.add([0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [False, False], [False, False])
    (out,) = rollout.minibatches(8, fields=["obs", "action"])
    memory = torch.zeros(12)
    out = TensorDict({**out, "obs": memory[:8], "action": memory[4:]}, batch_size=[8])
    with pytest.raises(rl.SchemaError, match=r"^out: expected leaves with memory of their own"):
        next(iter(rollout.minibatches(8, fields=["obs", "action"], out=out)))
