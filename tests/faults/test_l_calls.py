"""L: random public calls with random arguments on every kind of buffer, with `check()` after each.

A call works or raises one of the promised errors, and the buffer stays valid.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import relive as rl
from tests.conftest import BACKENDS
from tests.exporters import Lasting, c_strides
from tests.tiers import select
from tests.totals import SEED, tell, trials

PROMISED = (
    rl.SchemaError,
    rl.NotReadyError,
    rl.BufferFullError,
    rl.PriorityError,
    rl.CheckpointError,
    IndexError,
    KeyError,
    OverflowError,
    MemoryError,
    TypeError,
)
"""Errors that any call may raise; TypeError for an argument of a wrong type."""
ENVS = 2
LIFE = 60
"""Calls per buffer."""


class Fate:
    """Random choices of one history."""

    def __init__(self, *seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def one(self, things: Any) -> Any:
        return things[int(self.random.integers(len(things)))]

    def often(self, share: float) -> bool:
        return bool(self.random.random() < share)

    def shape(self) -> tuple[int, ...]:
        return tuple(int(n) for n in self.random.choice([0, 1, 2, 3], int(self.random.integers(0, 4))))

    def number(self) -> Any:
        return self.one(
            [0, 1, 2, 3, -1, 7, 0.5, -0.0, float("nan"), float("inf"), 1e308, 2**31, 2**63, -(2**63), 2**200, True, 1j]
        )

    def array(self) -> Any:
        kinds = ["f4", "f8", "?", "u1", "i8", "i4", "c8", "f2", ">f4", "M8[s]", "U1", "O", "u8"]
        shape, kind = self.shape(), np.dtype(self.one(kinds))
        if kind.kind == "O":
            return np.full(shape, self.number(), object)
        made = np.frombuffer(self.random.bytes(int(np.prod(shape)) * kind.itemsize), kind).reshape(shape)
        if kind.kind == "U":
            made = np.full(shape, "a")
        forms: list[Callable[[], Any]] = [
            lambda: made,
            lambda: made[..., ::-1] if shape else made,
            made.copy,
            made.tolist,
        ]
        return self.one(forms)()

    def tensor(self) -> Any:
        shape = self.shape()
        made = torch.from_numpy(self.random.standard_normal(shape)).float()
        forms: list[Callable[[], Any]] = [
            lambda: made, made.double, made.long, made.bool, made.bfloat16, made.requires_grad_, made.to_sparse,
            lambda: made.to("meta"), lambda: torch._neg_view(made), lambda: made.to(torch.complex64).conj(),
            lambda: torch.nn.Parameter(made), lambda: made.expand(2, *shape),
            lambda: made.transpose(0, -1) if shape else made,
            lambda: torch.from_numpy(np.array([2, 0], np.uint8).view(np.bool_)),
        ]  # fmt: skip
        return self.one(forms)()

    def anything(self) -> Any:
        """Return a random argument."""
        shape = self.shape()
        made: list[Callable[[], Any]] = [
            self.number, self.array, self.array, self.tensor, self.tensor,
            lambda: self.one([None, "", "obs", b"ab", bytearray(8), object(), Ellipsis, slice(None), int]),
            lambda: self.one([[], {}, (), set()]),
            lambda: {"a": self.array()}, lambda: [self.number(), self.array()], lambda: (self.tensor(), None),
            lambda: TensorDict({"a": torch.zeros(2)}, [2]),
            lambda: (ctypes.c_float * 2)(1, 2), lambda: (ctypes.c_bool * 2)(True, False), lambda: ctypes.c_double(1),
            lambda: Lasting(
                bytes(int(np.prod(shape)) * 4), self.one(["f", "i", "?", "T{f:x:}"]), 4, shape,
                c_strides(4, shape) if self.often(0.5) else None, offset=self.one([0, 1]),
            ),
        ]  # fmt: skip
        return self.one(made)()

    def mostly(self, right: Any) -> Any:
        return right if self.often(0.85) else self.anything()


def _step(fate: Fate, lead: tuple[int, ...], declared: dict[str, tuple[tuple[int, ...], Any]]) -> dict[str, Any]:
    """Return values for every field, mostly valid, in any accepted form."""
    found = {}
    for name, (shape, kind) in declared.items():
        values = (fate.random.standard_normal((*lead, *shape)) > 0).astype(kind) if fate.often(0.9) else fate.array()
        form = fate.one([lambda x: x, lambda x: x.tolist() if isinstance(x, np.ndarray) else x, torch.as_tensor])
        try:
            found[name] = fate.mostly(form(values))
        except (TypeError, ValueError, RuntimeError):  # torch has no such dtype
            found[name] = values
    return found


FIELDS: dict[str, tuple[tuple[int, ...], Any]] = {
    "obs": ((2,), np.float32), "action": ((), np.float32), "reward": ((), np.float32),
    "terminated": ((), np.bool_), "truncated": ((), np.bool_), "note": ((), np.bool_),
}  # fmt: skip
NOTE = {"note": rl.Field((), torch.bool)}


def _relabel(achieved: Any, goal: Any, rows: Any) -> Any:
    return rows["reward"], rows["terminated"]


_nothing: Any = lambda achieved, goal, rows: None  # noqa: E731 (of no type that is asked for)


def _views(fate: Fate) -> Any:
    return fate.one([
        None, None, rl.Transition(), rl.NStep(3, 0.9), rl.Sequence(3, burn_in=1), rl.Sequence(2, cross_episodes=True),
        rl.Sequence(3, step_index=True),
        rl.Sequence(2**63), rl.NStep(2**62, 1.0), rl.Hindsight("obs", "obs", _relabel),
        rl.Hindsight("obs", "obs", _nothing), rl.Transition, 7, rl.Window(obs=(-2, 0, 9), action=range(3)),
        rl.Window(action=(-(2**31) + 1, 2**31 - 1), view=rl.NStep(2**62, 1.0), pad="zero"), rl.Window(colour=(0,)),
    ])  # fmt: skip


def _replay(fate: Fate) -> tuple[Any, list[Callable[[], Any]]]:
    envs = fate.one([None, ENVS])
    lead = () if envs is None else (envs,)
    sampler = fate.one([
        rl.Uniform(), rl.Prioritized(), rl.Prioritized(eps=0.0), rl.WithoutReplacement(), rl.Counted(), rl.Recent(3),
        rl.NewFirst(),
    ])  # fmt: skip
    replay = rl.ReplayBuffer(
        12, 2, (), num_envs=envs, extra={"note": rl.Mutable(NOTE["note"])}, sampler=sampler, seed=1,
        next_obs=fate.one(["shared", "stored"]), autoreset=fate.one([None, "NEXT_STEP", "SAME_STEP"]),
        stats=rl.EpisodeStats(envs) if fate.often(0.3) else None,
    )  # fmt: skip
    kept: list[Any] = []

    def step(lead: tuple[int, ...] = lead) -> dict[str, Any]:
        return _step(fate, lead, {**FIELDS, "next_obs": FIELDS["obs"]})

    def add() -> None:
        some = fate.one([None, None, [0], [1, 0], [0, 0], [5], fate.anything()])
        replay.add(
            **step(lead if some is None or envs is None else (len(some),) if isinstance(some, list) else lead),
            env_ids=some,
        )

    def add_step() -> None:
        given = step()
        info = fate.one([{}, {"final_obs": fate.anything(), "_final_obs": fate.anything()}, None])
        taken = (given.pop("next_obs"), given.pop("reward"), given.pop("terminated"), given.pop("truncated"), info)
        replay.add_step(given["obs"], given["action"], fate.mostly(taken), note=given["note"])

    def sample() -> None:
        batch = replay.sample(fate.mostly(fate.one([1, 3, 8])), _views(fate), out=fate.one([None, None, *kept[-1:], 5]))
        kept.append(batch)

    def index() -> Any:
        ids = replay.ids()
        return fate.mostly(fate.one([ids, ids[:2], ids.tolist(), *(batch["index"] for batch in kept[-1:])]))

    def update() -> None:
        rows = index()
        right = np.abs(fate.random.standard_normal(len(rows))) if hasattr(rows, "__len__") else 1.0
        replay.update_priority(rows, fate.mostly(right))

    def write() -> None:
        rows = index()
        right = fate.random.random(len(rows)) < 0.5 if hasattr(rows, "__len__") else True
        replay.write(rows, **{fate.one(["note", "note", "note", "reward", "colour"]): fate.mostly(right)})

    def load() -> None:
        state = replay.state_dict()
        for part in state if fate.often(0.5) else ():
            if fate.often(0.2):
                state[part] = fate.anything()
        replay.load_state_dict(fate.mostly(state))

    return replay, [
        add, add, add, add, add_step, sample, sample, update, write, load,
        lambda: replay.stage(**{fate.one([*FIELDS, "colour"]): fate.mostly(step()["obs"])}),
        lambda: replay.extend(fate.mostly(step((3, *lead)))),
        lambda: replay.cut(fate.one([None, [0], fate.anything()])), lambda: replay.read(index(), _views(fate)),
        lambda: replay[index()], lambda: list(replay.episodes()), replay.__repr__, replay.columns.clone,
        lambda: fate.often(0.1) and replay.clear(),
    ]  # fmt: skip


def _rollout(fate: Fate) -> tuple[Any, list[Callable[[], Any]]]:
    envs = fate.one([None, ENVS])
    lead = () if envs is None else (envs,)
    rollout = rl.RolloutBuffer(
        6, envs, 2, (), extra=NOTE, seed=1, autoreset=fate.one([None, "NEXT_STEP", "SAME_STEP"]),
        stats=rl.EpisodeStats(envs) if fate.often(0.3) else None,
    )  # fmt: skip
    declared = {**FIELDS, "value": ((), np.float32)}

    def add() -> None:
        given = _step(fate, lead, declared)
        rollout.add(**given, final_obs=fate.one([None, None, given["obs"], fate.anything()]))

    def batches() -> None:
        sizes = fate.mostly(fate.one([1, 3, 100]))
        kind = fate.one(["minibatches", "sequences"])
        several = (
            rollout.minibatches(sizes, fields=fate.one([None, ["obs"], ["no"], 3]))
            if kind == "minibatches"
            else rollout.sequences(
                fate.one([None, 2, 5, 0, -1]),
                batch_size=sizes,
                layout=fate.one(["batch_first", "packed", "time_first"]),
            )
        )
        list(itertools.islice(several, 4))

    return rollout, [
        add, add, add, add, batches, batches,
        lambda: rollout.stage(**{fate.one([*FIELDS, "colour"]): fate.mostly(np.zeros((*lead, 2)))}),
        lambda: rollout.compute_advantage(fate.mostly(np.zeros(lead)), bootstrap_truncated=fate.one([True, False])),
        lambda: rollout.attach({fate.one(["target", "obs", 7]): fate.mostly(np.zeros((rollout.num_stored, *lead)))}),
        lambda: rollout.data, rollout.env_major, lambda: rollout[fate.one(["obs", "no", 3])],
        lambda: rollout.take_back(fate.one([None, 2, 9, -1, True])), lambda: rollout.final_obs,
        lambda: rollout.clear(restarted=fate.often(0.5)), lambda: fate.often(0.3) and rollout.data.share_memory_(),
    ]  # fmt: skip


def _distillation(fate: Fate) -> tuple[Any, list[Callable[[], Any]]]:
    buffer = rl.DistillationBuffer(9, 2, () if fate.often(0.5) else None, seed=1)

    def add() -> None:
        given = _step(fate, fate.one([(), (1,), (3,), (20,)]), {"obs": ((2,), np.float32), "action": ((), np.float32)})
        buffer.add(**given)

    return buffer, [
        add, add, add,
        lambda: buffer.sample(fate.mostly(4), recent=fate.one([None, 1, 2, {1: 0.5}, {1: 2.0}, fate.anything()])),
        lambda: list(itertools.islice(buffer.epochs(fate.mostly(3), drop_last=fate.often(0.5)), 3)),
        buffer.next_round, lambda: buffer[fate.mostly(np.arange(3))], lambda: fate.often(0.2) and buffer.clear(),
        lambda: buffer.mix(fate.mostly(np.zeros(3)), fate.mostly(np.ones(3)), fate.mostly(0.5)),
    ]  # fmt: skip


def _estimators(fate: Fate) -> tuple[Any, list[Callable[[], Any]]]:
    def flags() -> Any:
        return torch.from_numpy(fate.random.integers(0, 3, (4, 2)).astype(np.uint8).view(np.bool_))

    def gae() -> None:
        reward, value, after = (fate.mostly(torch.from_numpy(fate.random.random((4, 2)))) for _ in range(3))
        gamma = fate.one([0.9, 1, 2.0, None, fate.number()])
        rl.gae(reward, value, after, fate.mostly(flags()), fate.mostly(flags()), gamma=gamma, lam=0.9)

    return rl.RunningNorm(()), [gae]


KINDS = {"replay": _replay, "rollout": _rollout, "distillation": _distillation, "estimators": _estimators}


def _live(kind: str, number: int) -> tuple[int, int]:
    """Run one history; return the numbers of calls and of refused calls."""
    fate = Fate(SEED, number, list(KINDS).index(kind))
    buffer, calls = KINDS[kind](fate)
    refused = 0
    for call in range(LIFE):
        chosen = fate.one(calls)
        try:
            chosen()
        except PROMISED:
            refused += 1
        try:
            buffer.check()
        except rl.InvariantError as error:
            raise AssertionError((kind, number, call, getattr(chosen, "__name__", "?"))) from error
    return LIFE, refused


def _fuzz(seconds: float) -> None:
    end, total, refused = time.monotonic() + seconds, 0, 0
    for number in itertools.count():
        if time.monotonic() > end:
            break
        kind = list(KINDS)[number % len(KINDS)]
        with BACKENDS[list(BACKENDS)[number // len(KINDS) % len(BACKENDS)]]():
            calls, no = _live(kind, number)
        total, refused = total + calls, refused + no
    assert total > refused > 0
    tell(f"L: {total} calls with random arguments, {refused} refused; every check() after them passed")


@pytest.mark.promise("L")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seconds", select(2, of=[2, 5]))
def test_any_call_with_any_arguments_leaves_a_buffer(seconds: int) -> None:
    _fuzz(trials("L_SECONDS", seconds))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_any_call_with_any_arguments_leaves_a_buffer_for_long() -> None:
    _fuzz(trials("L_LONG", 600))
