"""`out=`: whatever does not fit is refused before rows are drawn, and an epoch ends in its first rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

import relive as rl
from tests.faults.digest import digest

HINDSIGHT = rl.Hindsight("goal", "at", lambda achieved, goal, rows: (rows["reward"], rows["terminated"]))


def made(sampler: rl.Sampler | None = None, rows: int = 10) -> rl.ReplayBuffer:
    replay = rl.ReplayBuffer(100, obs={"goal": 1, "at": 1}, action=(), sampler=sampler, seed=0)
    for t in range(rows):
        obs, after = ({"goal": [9.0], "at": [float(t + k)]} for k in (0, 1))
        replay.add(obs, 0.0, float(t), False, False, after)
    return replay


def mixed(sampler: rl.Sampler | None = None) -> rl.Mixture:
    return rl.Mixture({"a": made(sampler)}, [1])


class Weighing(rl.Sampler):
    """A user's epochs with weights."""

    returns_weights = may_return_fewer = True
    independent = False

    def on_bind(self) -> None:
        self.at = 0

    def sample(self, count: int) -> Any:
        slots = self.storage.stored()[self.at : self.at + count]
        self.at += count
        return slots, 1.0 + slots.float()


@pytest.mark.parametrize("view", [None, HINDSIGHT], ids=["transitions", "hindsight"])
@pytest.mark.parametrize("make", [made, mixed])
def test_the_rest_of_an_epoch_is_in_the_first_rows(make: Any, view: Any, backend: str) -> None:
    one, twin = (make(rl.WithoutReplacement()) for _ in range(2))
    out = one.sample(6, view)
    twin.sample(6, view)
    rest, expected = one.sample(6, view, out=out), twin.sample(6, view)
    assert len(rest) == 4
    assert (rest == expected).all()
    assert rest["reward"].data_ptr() == out["reward"].data_ptr()


def test_the_rest_of_an_epoch_with_weights(backend: str) -> None:
    for count in (4, 9):  # the rest are 2 rows, and 1
        one, twin = made(Weighing()), made(Weighing())
        out = one.sample(count)
        twin.sample(count)
        while one.sampler.at + count <= 10:  # type: ignore[attr-defined]
            one.sample(count, out=out)
            twin.sample(count)
        rest, expected = one.sample(count, out=out), twin.sample(count)
        assert (rest == expected).all()


def _of_another_dtype(out: TensorDict) -> Any:
    return out.clone().set("reward", out["reward"].double())


def _without_rows(out: TensorDict) -> Any:
    return TensorDict(out.to_dict(), batch_size=[])


def _lazy(out: TensorDict) -> Any:
    return LazyStackedTensorDict(*[out[i].clone() for i in range(len(out))])


@pytest.mark.parametrize("wrong", [_of_another_dtype, _without_rows, _lazy])
@pytest.mark.parametrize("view", [None, HINDSIGHT], ids=["transitions", "hindsight"])
def test_a_wrong_one_draws_nothing(view: Any, wrong: Any, backend: str) -> None:
    replay = made(rl.WithoutReplacement())
    out = replay.sample(3, view)
    before = digest(replay._random, replay.sampler)
    with pytest.raises(rl.SchemaError, match="^out"):
        replay.sample(3, view, out=wrong(out))
    assert digest(replay._random, replay.sampler) == before


@pytest.mark.parametrize("sampler", [rl.Uniform(), rl.Prioritized()])
def test_one_that_was_made_in_inference_mode_is_filled(sampler: rl.Sampler, backend: str) -> None:
    one, twin = made(sampler), made(sampler)
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
    mixture = rl.Mixture({"a": made(), "b": made(rl.WithoutReplacement(), 3)}, [1, 1])
    first = mixture.buffers["a"]
    before = digest(first._random, first.sampler)
    with pytest.raises(rl.NotReadyError):
        mixture.sample(20)
    assert digest(first._random, first.sampler) == before


@pytest.mark.parametrize("leaf", [999, -1, 1.5])
def test_a_plan_of_leaves_that_there_are_not_is_refused(leaf: Any, backend: str) -> None:
    class Beyond:
        def plan(self, schema: Any) -> Any:
            plan = rl.Transition().plan(schema)
            reads = (plan.reads[0]._replace(leaf=leaf), *plan.reads[1:])
            return type(plan)(reads)

    with pytest.raises(rl.SchemaError, match=r"^Beyond\.plan: expected leaves from 0 to"):
        made().sample(2, Beyond())


def test_an_index_of_another_shape_is_refused(backend: str) -> None:
    class Odd:
        def plan(self, schema: Any) -> Any:
            return rl.Transition().plan(schema)

        def finish(self, batch: Any, context: Any) -> Any:
            return batch | {("index",): batch[("index",)].unsqueeze(1).expand(-1, 3)}

    with pytest.raises(rl.SchemaError, match=r"^Odd\.finish: index: expected int64 of shape \(4,\)"):
        made().sample(4, Odd())
