"""Tests of read plans, and of views that users write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from relive import kernels
from relive.replay import Leaves, ReadPlan
from relive.replay.read_plan import LAST, NEXT, ROW, LeafRead, ReadAnchor, ReadGroup, ReadLayout
from relive.replay.torch_reader import reduce_steps

STEP = torch.tensor([1.0, 0.0])
"""What every step adds to the observation."""
VIEWS = [
    rl.Transition(),
    rl.NStep(1, 0.9),
    rl.NStep(3, 0.9),
    rl.NStep(50, 0.5),
    rl.Sequence(4),
    rl.Sequence(3, 2, step_index=True),
    rl.Window(obs=(-1, 0, 1), action=range(3)),
    rl.Window(obs=(-3, 0), next_obs=(-1, 0, 2), reward=(0, 1), view=rl.NStep(3, 0.9), pad="zero"),
    rl.Window(action=range(4), view=rl.NStep(4, 0.9)),
]


def make_buffer(**options: Any) -> rl.ReplayBuffer:
    """Make a wrapped ring of episodes of several lengths; observations are the numbers of step and environment."""
    replay = rl.ReplayBuffer(24, obs=2, action=1, num_envs=2, extra={"state": rl.Carry(2)}, seed=0, **options)
    rng = np.random.default_rng(3)
    for t in range(20):
        obs, flags = np.stack([[t, env] for env in range(2)]).astype(np.float32), rng.random((2, 2)) < 0.1
        terminated, truncated = flags
        action, reward, state = rng.random((2, 1)), rng.random(2), rng.random((2, 2))
        replay.add(obs, action, reward, terminated, truncated, obs + STEP.numpy(), state=state)
    return replay


@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_unchanged_steps_are_reduced_to_the_batch_of_the_plan(view: Any, backend: str) -> None:
    replay = make_buffer()
    store: Any = replay.storage
    plan = view.plan(store.schema).limit_to_slots(store.schema, store.rows.ring.slots)
    slots = store.stored()
    read = store.make_reader(plan).read(slots)
    reduced = reduce_steps(store.make_reader(plan.with_all_steps(store.schema)).read(slots), plan)
    assert list(read) == list(reduced) == list(plan.paths)
    for path, leaf in read.items():
        assert torch.equal(leaf, reduced[path]), path


@dataclass(frozen=True)
class MixedView:
    """View with a combination of anchors and offsets that no view of relive has."""

    layout: ReadLayout

    def plan(self, schema: Any) -> ReadPlan:
        obs, action, reward, terminated = (schema.leaf_indices[n][0] for n in ("obs", "action", "reward", "terminated"))
        around = ReadGroup(ReadAnchor.ROW, (2, -1, 0), ("reward_mask",))
        after = ReadGroup(ReadAnchor.NEXT, (-2, 1), counts_observations=True)
        reads = (
            LeafRead(("last_obs",), obs, LAST), LeafRead(("after",), obs, NEXT), LeafRead(("obs",), obs, ROW),
            LeafRead(("rewards",), reward, around), LeafRead(("ends",), terminated, around),
            LeafRead(("later",), obs, after), LeafRead(("action",), action, LAST),
        )  # fmt: skip
        return ReadPlan(reads, n=3, gamma=0.9, layout=self.layout)


@pytest.mark.parametrize("layout", [ReadLayout.NEAREST, ReadLayout.ZEROS])
def test_every_backend_reads_any_plan_alike(layout: ReadLayout) -> None:
    replay, view = make_buffer(), MixedView(layout)
    with kernels.force("torch"):
        other = make_buffer()
    batch, other_batch = (each.read(replay.ids(), view) for each in (replay, other))
    assert list(batch.keys()) == list(other_batch.keys())
    assert bool((batch == other_batch).all())
    last = batch["last_obs"][:, 0] - batch["obs"][:, 0]
    assert torch.equal(batch["discount"], (0.9 ** (last + 1).double()).float())
    assert torch.equal(batch["after"], batch["last_obs"] + STEP)


def test_a_view_of_the_old_interface_is_refused_with_the_new_methods() -> None:
    class Old:
        def read(self, store: Any, slots: Any, random: Any) -> Any: ...

    with pytest.raises(
        rl.SchemaError, match=r"view: expected a view with a method plan, got .*finish\(batch, context\)"
    ):
        make_buffer().sample(4, Old())  # pyright: ignore[reportArgumentType]


# Not frozen and therefore without a hash, so that buffers cannot cache this view.
@dataclass
class RelativeView:
    """View with the number of steps before and after each row, and the next row's observation."""

    plans: list[int] = field(default_factory=list)

    def plan(self, schema: Any) -> ReadPlan:
        self.plans.append(0)
        return rl.Transition().plan(schema)

    def finish(self, batch: Leaves, context: Any) -> Leaves:
        later = context.column(("obs",), context.shift(torch.ones_like(context.slots)))
        return {
            ("left",): context.count_following(),
            ("gone",): context.count_preceding(),
            ("later",): later,
            ("obs",): batch[("obs",)],
        }


def test_the_context_counts_steps_and_reads_other_rows(backend: str) -> None:
    replay, view = make_buffer(), RelativeView()
    batch = replay.read(replay.ids(), view)
    assert set(batch.keys()) == {"left", "gone", "later", "obs", "index"}
    assert torch.equal(batch["later"][:, 0], batch["obs"][:, 0] + 1)
    whole = torch.cat([torch.full((len(e),), len(e) - 1) for e in replay.episodes()])
    order = torch.cat([e["index"] for e in replay.episodes()])
    expected = dict(zip(order.tolist(), whole.tolist(), strict=True))
    assert (batch["left"] + batch["gone"]).tolist() == [expected[i] for i in batch["index"].tolist()]


def test_equal_views_are_planned_once() -> None:
    @dataclass(frozen=True)
    class Counted:
        plans: tuple[list[int], ...] = field(default=(), compare=False)

        def plan(self, schema: Any) -> ReadPlan:
            self.plans[0].append(0)
            return rl.NStep(2, 0.9).plan(schema)

    replay, plans = make_buffer(), []
    for _ in range(3):
        assert "discount" in replay.sample(4, Counted((plans,))).keys()
    assert len(plans) == 1


INVALID_RESULTS: dict[str, tuple[Any, str]] = {
    "None": (lambda _: None, ": expected a dict of tensors by path, got NoneType"),
    "names": (lambda batch: {"obs": batch[("obs",)]}, ": expected paths that are tuples of names, got 'obs'"),
    "fewer rows": (lambda batch: {("obs",): batch[("obs",)][1:]}, r": obs: expected 4 rows on cpu, got \(3"),
    "one number": (lambda batch: {("obs",): batch[("obs",)].sum()}, r": obs: expected 4 rows on cpu, got \(\)"),
    "a list": (lambda _: {("obs",): [1, 2, 3, 4]}, ": obs: expected 4 rows on cpu, got list"),
    "another device": (
        lambda batch: {("obs",): batch[("obs",)].to("meta")},
        ": obs: expected 4 rows .* meta",
    ),
    "an index of another shape": (
        lambda batch: batch | {("index",): batch[("index",)].unsqueeze(1).expand(-1, 3)},
        r": index: expected int64 of shape \(4,\)",
    ),
}


@dataclass(frozen=True)
class Wrong(rl.View):
    """View whose `finish` returns an invalid batch."""

    returned: Any

    def plan(self, schema: Any) -> ReadPlan:
        return rl.Transition().plan(schema)

    def finish(self, batch: Leaves, context: Any) -> Any:
        return self.returned(batch)


@pytest.mark.parametrize("name", INVALID_RESULTS)
def test_the_result_of_a_users_view_is_verified(name: str, backend: str) -> None:
    returned, message = INVALID_RESULTS[name]
    replay = make_buffer()
    with pytest.raises(rl.SchemaError, match=rf"^Wrong\.finish{message}"):
        replay.sample(4, Wrong(returned))
    replay.check()


def with_offsets(*offsets: Any) -> Callable[[Any], ReadPlan]:
    """Return a function that makes a plan of sequences with these offsets for the first leaves, then with the last."""

    def make(schema: Any) -> ReadPlan:
        plan = rl.Sequence(2).plan(schema)
        ends = [offsets[min(i, len(offsets) - 1)] for i in range(len(plan.reads))]
        windows = (
            read if read.group.offsets is None else read._replace(group=read.group._replace(offsets=chosen))
            for read, chosen in zip(plan.reads, ends, strict=True)
        )
        return ReadPlan(tuple(windows), layout=plan.layout)

    return make


def with_leaf(leaf: Any) -> Callable[[Any], ReadPlan]:
    def make(schema: Any) -> ReadPlan:
        first, *others = rl.Transition().plan(schema).reads
        return ReadPlan((first._replace(leaf=leaf), *others))

    return make


RANGE = "consecutive offsets around 0"
INVALID_PLANS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda schema: {"obs": 0}, "a ReadPlan, got dict"),
    *((with_leaf(leaf), "leaves from 0 to") for leaf in (999, -1, 1.5)),
    *((with_offsets(offsets), RANGE) for offsets in ((-1, 1), (1, 2), (0, 1, 3), (1, 0))),
    (with_offsets(()), "at least one offset"),
    (with_offsets(range(3), range(2)), RANGE),
]


@pytest.mark.parametrize(("make", "expected"), INVALID_PLANS)
def test_the_plan_of_a_users_view_is_verified(make: Callable[[Any], Any], expected: str, backend: str) -> None:
    class Invalid:
        def plan(self, schema: Any) -> Any:
            return make(schema)

    with pytest.raises(rl.SchemaError, match=rf"^Invalid\.plan: expected {expected}"):
        make_buffer().sample(4, Invalid())


VIEWS = (
    rl.Transition(), rl.NStep(3, 0.9), rl.Sequence(3, burn_in=1, step_index=True), rl.Sequence(2, cross_episodes=True),
    rl.Window(obs=(-1, 0), action=range(3), pad="zero"), rl.Window(next_obs=(0, 1), view=rl.NStep(2, 0.5)),
)  # fmt: skip


@pytest.mark.parametrize("view", VIEWS, ids=repr)
def test_the_specs_of_a_plan_are_those_of_its_batches(view: Any, backend: str) -> None:
    replay = make_buffer()
    plan = view.plan(replay.storage.schema).limit_to_slots(replay.storage.schema, replay.storage.ring.slots)
    batch = replay.sample(5, view)
    found = {key if isinstance(key, tuple) else (key,): leaf for key, leaf in batch.items(True, True)}
    assert plan.leaf_specs(replay.storage.schema, 5) == {
        path: (tuple(leaf.shape), leaf.dtype) for path, leaf in found.items()
    }
