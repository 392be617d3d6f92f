"""C11: every dtype and name of a field, in every position: copies, saves and loads keep every bit."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import relive as rl
from relive.schema.fields import DTYPES
from tests.checkpoint.traffic import digest, equal
from tests.conftest import running
from tests.totals import tell

ENVS, ROWS = 2, 6


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return numbers of a dtype with random bits: every kind of NaN, infinities, subnormal numbers, both zeros."""
    rng = np.random.default_rng([*shape, *map(ord, str(dtype))])
    raw = rng.integers(0, 2 if dtype == torch.bool else 256, (math.prod(shape), dtype.itemsize), np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def declare_fields(dtype: torch.dtype) -> dict[str, Any]:
    """Declare fields of one dtype in every position that all kinds of buffers have."""
    field, number = rl.Field(3, dtype), rl.Field((), dtype)
    return {"obs": {"x": field, "y": (number, number)}, "action": field, "extra": {"tag": number, "deep": {"a": field}}}


def make_values(dtype: torch.dtype, *lead: int) -> dict[str, Any]:
    """Return random values for declared fields."""
    x, y, action, deep = (random_bits(dtype, *lead, size) for size in (3, 2, 4, 5))
    y = y.unbind(-1)
    obs = {"x": x, "y": {str(i): leaf.contiguous() for i, leaf in enumerate(y)}}
    return {"obs": obs, "action": action[..., :3], "tag": random_bits(dtype, *lead), "deep": {"a": deep[..., 2:]}}


def select_steps(tree: Any, *index: Any) -> Any:
    """Select some steps from the values of all steps."""
    return {name: select_steps(part, *index) for name, part in tree.items()} if isinstance(tree, dict) else tree[index]


def make_replay(dtype: torch.dtype, next_obs: Any = "shared", device: Any = "cpu") -> rl.ReplayBuffer:
    """Return a replay buffer whose rings have wrapped around, in some environments further than in others."""
    fields, real = declare_fields(dtype), dtype if dtype.is_floating_point else torch.float32
    extra = fields.pop("extra") | {"latent": rl.Mutable(rl.Field(3, dtype)), "carry": rl.Mutable(rl.Carry(2, dtype))}
    replay = rl.ReplayBuffer(
        ROWS * ENVS, **fields, num_envs=ENVS, reward=rl.Mutable(rl.Field((), real)), extra=extra, next_obs=next_obs,
        device=device, seed=0,
    )  # fmt: skip
    add_steps(replay, dtype)
    written = replay.sample(4)["index"].unique()
    replay.write(written, latent=random_bits(dtype, len(written), 3), carry=random_bits(dtype, len(written), 2))
    replay.stage(latent=random_bits(dtype, ENVS, 3), action=random_bits(dtype, ENVS, 3))
    return replay


def add_steps(replay: rl.ReplayBuffer, dtype: torch.dtype, first: int = 0) -> None:
    """Add ten steps, every second one of a single environment."""
    real = dtype if dtype.is_floating_point else torch.float32
    steps, clock = make_values(dtype, 32, ENVS), [first] * ENVS
    for turn in range(10):
        envs = [0] if turn % 2 else [0, 1]
        now, coming = (select_steps(steps, [clock[e] + ahead for e in envs], envs) for ahead in (0, 1))
        ends = torch.zeros(len(envs), dtype=torch.bool)
        replay.add(
            reward=torch.ones(len(envs), dtype=real), terminated=ends, truncated=ends, next_obs=coming["obs"],
            env_ids=envs, **now, latent=random_bits(dtype, len(envs), 3), carry=random_bits(dtype, len(envs), 2),
        )  # fmt: skip
        for env in envs:
            clock[env] += 1


def make_rollout(dtype: torch.dtype) -> rl.RolloutBuffer:
    """Return a rollout with final observations, hidden states and an attached field."""
    fields = declare_fields(dtype)
    fields["extra"] |= {"carry": rl.Carry(2, dtype)}
    rollout = rl.RolloutBuffer(ROWS, ENVS, **fields, autoreset="SAME_STEP", seed=0)
    add_rollout(rollout, dtype, range(4))
    rollout.attach(score=random_bits(dtype, 4, ENVS, 3), nested={"a": random_bits(dtype, 4, ENVS)})
    rollout.stage(action=random_bits(dtype, ENVS, 3))
    return rollout


def add_rollout(rollout: rl.RolloutBuffer, dtype: torch.dtype, turns: range) -> None:
    steps = make_values(dtype, 32, ENVS)
    for t in turns:
        ends, real = torch.tensor([t == 2, False]), torch.ones(ENVS)
        rollout.add(
            reward=real, terminated=torch.zeros(ENVS, dtype=torch.bool), truncated=ends, value=real,
            final_obs=select_steps(steps, t + 9)["obs"], **select_steps(steps, t), carry=random_bits(dtype, ENVS, 2),
        )  # fmt: skip


def make_distillation(dtype: torch.dtype) -> rl.DistillationBuffer:
    """Return a distillation buffer of two rounds whose ring has wrapped around."""
    buffer = rl.DistillationBuffer(ROWS, **declare_fields(dtype), seed=0)
    for count in (4, 5):
        buffer.add(**make_values(dtype, count))
        buffer.next_round()
    return buffer


def change_buffer(buffer: Any, dtype: torch.dtype) -> None:
    """Change a buffer, to give a second save something to write."""
    if isinstance(buffer, rl.DistillationBuffer):
        buffer.add(**make_values(dtype, 2))
    elif isinstance(buffer, rl.ReplayBuffer):
        buffer._input.staged.clear()
        add_steps(buffer, dtype, first=11)
    else:
        buffer.clear()
        add_rollout(buffer, dtype, range(3))


KINDS: dict[str, Callable[[torch.dtype], Any]] = {
    "shared next_obs": make_replay,
    "stored next_obs": lambda dtype: make_replay(dtype, "stored"),
    "rollout": make_rollout,
    "distillation": make_distillation,
}


def iter_copies(buffer: Any, fresh: Any, dtype: torch.dtype, root: Path) -> Iterator[tuple[str, Any]]:
    """Yield copies of the buffer, made in every possible way; `fresh` is an empty buffer of the same settings."""
    yield "deepcopy", copy.deepcopy(buffer)
    yield "pickle", pickle.loads(pickle.dumps(buffer))
    fresh.load_state_dict(buffer.state_dict())
    yield "load_state_dict", fresh
    buffer.save(root)
    yield "load", rl.load(root)
    yield from load_into_other_memory(buffer, root)
    first, second = digest(buffer), rl.load(root)
    change_buffer(second, dtype)
    assert not equal(digest(second), first)
    second.save(root)
    assert equal(digest(rl.load(root)), digest(second)), "the second save"
    yield "load the first of two", rl.load(root, number=1)


def load_into_other_memory(buffer: Any, root: Path) -> Iterator[tuple[str, Any]]:
    """Yield the checkpoint loaded into shared memory and disk memory, if the native core is in use."""
    if not isinstance(buffer, rl.ReplayBuffer) or rl.kernels.backend() == "torch":
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "load: own memory became")
        shared, disk = (
            rl.load(root, rl.ReplayBuffer, device=one) for one in (rl.Memory.shared(), rl.Memory.disk(root / "disk"))
        )
    yield "shared memory", shared
    assert equal(digest(rl.connect(shared.handle()))[3], digest(shared)[3]), "the rows of another process"
    disk.save(root.with_name("saved"))
    disk.close()
    with rl.load(root / "disk", rl.ReplayBuffer) as reopened:
        yield "disk memory", reopened
    yield "load of disk memory", rl.load(root.with_name("saved"))


def assert_newest_rows(buffer: Any, dtype: torch.dtype) -> None:
    """Read the newest rows, whose mutable fields were never rewritten."""
    steps = make_values(dtype, 32, ENVS)
    if isinstance(buffer, rl.ReplayBuffer):
        rows, envs = [7, 9, 4], [0, 0, 1]
        found = buffer[[row * ENVS + env for row, env in zip(rows, envs, strict=True)]].to_dict()
        expected = select_steps(steps, rows, envs) | {
            "next_obs": select_steps(steps, [row + 1 for row in rows], envs)["obs"]
        }
    elif isinstance(buffer, rl.RolloutBuffer):
        expected = select_steps(steps, slice(4))
        found = {name: buffer[name] for name in expected}
        found = {name: x if isinstance(x, torch.Tensor) else x.to_dict() for name, x in found.items()}
    else:
        found = buffer.sample(16).to_dict()
        rows = found["index"] - 4
        assert bool((rows >= -1).all())
        found, expected = select_steps(found, rows >= 0), select_steps(make_values(dtype, 5), rows[rows >= 0])
    for name, tree in expected.items():
        assert equal(found[name], tree), name


@pytest.mark.promise("C11")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_buffer_of_any_dtype_stays_the_same_bit_for_bit(kind: str, backend: str, tmp_path: Path) -> None:
    ways: Counter[str] = Counter()
    with running(backend):
        for dtype in DTYPES:
            buffer = KINDS[kind](dtype)
            assert_newest_rows(buffer, dtype)
            expected = digest(buffer)
            for way, found in iter_copies(buffer, KINDS[kind](dtype), dtype, tmp_path / str(dtype) / "root"):
                assert equal(digest(found), expected), (dtype, way)
                found.check()
                ways[way] += 1
            assert equal(digest(buffer), expected), dtype
    tell(f"C11: {kind}, {backend}: {len(DTYPES)} dtypes, {ways.total()} copies ({', '.join(ways)})")


@pytest.mark.promise("C11")
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_final_observations_of_any_dtype_are_put_in_their_place(backend: str) -> None:
    with running(backend):
        for dtype in DTYPES:
            x, no = random_bits(dtype, 3, ENVS, 3), torch.zeros(ENVS, dtype=torch.bool)
            replay = rl.ReplayBuffer(8, rl.Field(3, dtype), (), num_envs=ENVS, autoreset="SAME_STEP", seed=0)
            info = {"final_obs": x[2], "_final_obs": np.array([False, True])}
            replay.add_step(x[0], torch.zeros(ENVS), (x[1], torch.zeros(ENVS), no, torch.tensor([False, True]), info))
            assert equal(replay[[0, 1]]["next_obs"], torch.stack([x[1, 0], x[2, 1]])), dtype


NAMES = ("0", "_", "a.b", "a-b.c", "A" * 128, "keys", "None", "column0", "first")
BAD_NAMES = ("ü", "a/b", "a b", "a\n", "..", ".a", "-a", "A" * 129)


def make_named_buffers(name: str) -> dict[str, Callable[[], Any]]:
    """Functions that make buffers with a given name in every position that has names."""

    def replay(**options: Any) -> rl.ReplayBuffer:
        return rl.ReplayBuffer(4, **{"obs": 1, "action": 1, "seed": 0, **options})

    def staged() -> rl.ReplayBuffer:
        buffer = replay(extra={name: 1})
        buffer.stage(**{name: [2.0]})
        return buffer

    def rollout() -> rl.RolloutBuffer:
        buffer = rl.RolloutBuffer(4, None, 1, 1, extra={name: {name: rl.Carry(1)}}, seed=0)
        buffer.stage(**{name: {name: [2.0]}})
        return buffer

    def attached() -> rl.RolloutBuffer:
        buffer = rl.RolloutBuffer(4, None, 1, 1, seed=0)
        buffer.add([0.0], [0.0], 0.0, False, False)
        buffer.attach(**{name: {name: [[1.0]]}})
        return buffer

    def inferred(**values: Any) -> rl.DistillationBuffer:
        buffer = rl.DistillationBuffer(4, 1, seed=0)
        buffer.add(**{"obs": [0.0], "action": [0.0], **values})
        return buffer

    norm = {("obs", name, name): rl.RunningNorm(1)}
    return {
        "obs, norm": lambda: replay(obs={name: {name: 1}}, norm=norm),
        "action": lambda: replay(action={name: 1}),
        "reward": lambda: replay(reward={name: ()}),
        "space": lambda: replay(obs=gym.spaces.Dict({name: gym.spaces.Box(0, 1, (1,))})),
        "extra": staged,
        "metric": lambda: replay(stats=rl.EpisodeStats(None, metrics=[name])),
        "reason": lambda: replay(stats=rl.EpisodeStats(None, reasons=[name])),
        "rollout": rollout,
        "attached": attached,
        "declared": lambda: rl.DistillationBuffer(4, 1, 1, extra={name: 1}, seed=0),
        "inferred": lambda: inferred(**{name: [1.0]}),
        "inferred action": lambda: inferred(action={name: [1.0]}),
    }


@pytest.mark.promise("C11")
def test_every_name_that_is_accepted_is_saved_and_every_other_one_is_refused_at_once(tmp_path: Path) -> None:
    for i, name in enumerate(NAMES):
        for place, make in make_named_buffers(name).items():
            buffer, root = make(), tmp_path / f"{place} {i}"
            buffer.save(root)
            for found in (rl.load(root), copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
                assert equal(digest(found), digest(buffer)), (place, name)
    for name in BAD_NAMES:
        for place, make in make_named_buffers(name).items():
            with pytest.raises(rl.SchemaError, match=r"expected names .*like \[A-Za-z0-9_\].* Rename it") as caught:
                make()
            assert repr(name) in str(caught.value), place
    tell(f"C11: {len(NAMES)} names saved, {len(BAD_NAMES)} refused, in {len(make_named_buffers('a'))} places")


@pytest.mark.promise("C11")
def test_names_that_look_alike_stay_apart(tmp_path: Path) -> None:
    extra = {"a.b": 1, "a": {"b": 1, "0": 1, "c": (rl.Field(1), rl.Field(1))}, "a.0": 1, "a.c.0": 1}
    leaves = {"a": {"b": [1.0], "0": [2.0], "c": ([3.0], [4.0])}, "a.b": [5.0], "a.0": [6.0], "a.c.0": [7.0]}
    replay = rl.ReplayBuffer(4, 1, 1, extra=extra, seed=0)
    replay.add([0.0], [0.0], 0.0, False, False, [1.0], **leaves)
    replay.stage(**leaves)
    replay.save(tmp_path)
    loaded = rl.load(tmp_path, rl.ReplayBuffer)
    assert equal(digest(loaded), digest(replay))
    batch = loaded[[0]]
    found = [batch[key].item() for key in (("a", "b"), ("a", "0"), ("a", "c", "0"), ("a", "c", "1"))]
    assert found + [batch[key].item() for key in ("a.b", "a.0", "a.c.0")] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.promise("C11")
def test_whatever_can_be_declared_can_be_loaded(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(63):
        deep = {"a": deep}
    many = rl.EpisodeStats(None, metrics=[f"m{i}" for i in range(1100)])
    buffers = [
        rl.ReplayBuffer(4, deep, 1, norm={("obs", *"a" * 63): rl.RunningNorm(1)}, seed=0),
        rl.ReplayBuffer(4, (1,) * 20, (), stats=many, seed=0),
        rl.RolloutBuffer(4, 2, (1,) * 20, (), seed=0),
    ]
    for i, buffer in enumerate(buffers):
        buffer.save(tmp_path / str(i))
        assert equal(digest(rl.load(tmp_path / str(i))), digest(buffer))
        assert equal(digest(copy.deepcopy(buffer)), digest(buffer))
    with pytest.raises(rl.SchemaError, match="at most 64 names around a field, got 65"):
        rl.ReplayBuffer(4, {"a": deep}, 1)
