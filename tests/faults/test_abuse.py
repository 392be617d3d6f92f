"""G: every wrong call of the API raises an error of the promised form and changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import relive as rl
from relive import kernels
from tests.conftest import BACKENDS
from tests.faults.digest import digest
from tests.totals import tell

NAN, INF = float("nan"), float("inf")
FORM = re.compile(r"(?s)\S.*: expected .+, got .+\. \S.*")
N = 2
"""Number of environments of every buffer in this file."""


@dataclass(frozen=True)
class Case:
    """A wrong call of an object."""

    name: str
    make: Callable[[], Any]
    call: Callable[[Any], object]
    error: type[Exception] = rl.SchemaError
    draws: bool = False
    """Whether the call fails on the result of a caller's function, after random numbers were used."""

    @property
    def called(self) -> str:
        """Name of the called function, without arguments."""
        return re.split(r"[ (\[]", self.name, maxsplit=1)[0]


def nothing() -> None:
    """Placeholder object for calls of constructors and functions."""


# Valid values of each field, for two environments


def right(steps: int | None = None) -> dict[str, Any]:
    """Return a step or block of all environments with every field that any buffer has."""
    lead = (N,) if steps is None else (steps, N)
    return {
        "obs": {"image": np.ones((*lead, 2, 2), np.uint8), "vector": np.ones((*lead, 3), np.float32)},
        "action": np.ones(lead, np.int64),
        "reward": np.ones(lead, np.float32),
        "terminated": np.zeros(lead, bool),
        "truncated": np.zeros(lead, bool),
        "next_obs": {"image": np.full((*lead, 2, 2), 2, np.uint8), "vector": np.full((*lead, 3), 2, np.float32)},
        "note": np.ones((*lead, 2), np.float32),
    }


DECLARED: dict[str, Any] = {
    "obs": {"image": rl.Field((2, 2), torch.uint8), "vector": 3},
    "action": rl.Field((), torch.int64),
    "extra": {"note": 2},
}


def wrong_values(value: np.ndarray) -> dict[str, Any]:
    """Yield wrong values for a field with the valid `value` [N, …] or [T, N, …]."""
    wrong: dict[str, Any] = {
        "missing": None,
        "a number": 1,
        "an axis more": value[..., None],
        "an axis more in front": value[None],
        "without the first axis": value[0],
        "one row": value[:1],
        "a row more": np.concatenate([value, value[:1]]),
        "no rows": value[:0],
        "complex": value.astype(np.complex64),
        "text": np.full(value.shape, "x"),
        "objects": value.astype(object),
        "dates": np.zeros(value.shape, "datetime64[s]"),
        "ragged": [[1.0], [1.0, 2.0]],
        "a dict": {"a": value},
        "an object": object(),
        "meta": torch.as_tensor(value).to("meta"),
        "sparse": torch.as_tensor(value.astype(np.float32)).to_sparse(),
    }
    if value.dtype.kind in "iu":
        wrong |= {"floats": value.astype(np.float32), "too large": np.full(value.shape, 2.0**70)}
    if value.dtype == np.uint8:
        wrong |= {"negative": np.full(value.shape, -1), "beyond a byte": np.full(value.shape, 256)}
    if value.dtype == bool:
        wrong |= {"numbers": value.astype(np.float32), "bytes": value.astype(np.uint8)}
    return wrong


def wrong_steps(fields: dict[str, Any], optional: tuple[str, ...] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield steps with one field replaced by a wrong value."""
    for name, value in fields.items():
        if isinstance(value, dict):
            for key, leaf in value.items():
                for label, wrong in wrong_values(leaf).items():
                    yield f"{name}.{key}: {label}", fields | {name: value | {key: wrong}}
            yield f"{name}: a leaf missing", fields | {name: {"image": value["image"]}}
            yield f"{name}: a leaf more", fields | {name: value | {"sound": 1}}
            yield f"{name}: no dict", fields | {name: value["image"]}
        else:
            for label, wrong in wrong_values(value).items():
                if not (label == "missing" and name in optional):
                    yield f"{name}: {label}", fields | {name: wrong}
    yield "an unknown field", fields | {"colour": 1}


def numbers(*, whole: bool) -> dict[str, Any]:
    """Values that are no positive numbers."""
    wrong = {"0": 0, "-1": -1, "True": True, "text": "3", "none": None, "a list": [1], "NaN": NAN}
    return wrong | ({"1.5": 1.5, "1.0": 1.0} if whole else {})


def fractions() -> dict[str, Any]:
    """Values outside [0, 1]."""
    return {"-0.1": -0.1, "1.1": 1.1, "NaN": NAN, "infinity": INF, "True": True, "text": "0.5", "a list": [0.5]}


# Replay buffers


def replay(**options: Any) -> rl.ReplayBuffer:
    """Return a buffer of eight rows after eleven steps: the ring has wrapped around, and no part is empty."""
    listeners = {"stats": rl.EpisodeStats(N), "norm": {("obs", "vector"): rl.RunningNorm(3)}}
    make_subject = rl.ReplayBuffer(
        16, **{**DECLARED, "num_envs": N, "seed": 0, "autoreset": "Disabled", **listeners, **options}
    )
    for t in range(11):
        step = right()
        for leaf in ("image", "vector"):
            step["obs"][leaf][:] = t
            step["next_obs"][leaf][:] = t + 1
        make_subject.add(**step)
    if make_subject.sampler != rl.Uniform():
        make_subject.sample(4)
    return make_subject


def prioritized() -> rl.ReplayBuffer:
    make_subject = replay(sampler=rl.Prioritized())
    make_subject.update_priority(make_subject.ids()[:4], [1.0, 2.0, 3.0, 4.0])
    return make_subject


def empty_replay(**options: Any) -> rl.ReplayBuffer:
    return rl.ReplayBuffer(16, **DECLARED, num_envs=N, **options)


REPLAYS: dict[str, Callable[[], rl.ReplayBuffer]] = {
    "replay": replay,
    "prioritized": prioritized,
    "stored": lambda: replay(next_obs="stored"),
    "next_step": lambda: replay(autoreset="NextStep"),
}


def replay_cases() -> Iterator[Case]:
    for kind, make in REPLAYS.items():
        for label, step in wrong_steps(right()):
            yield Case(f"{kind}.add({label})", make, lambda b, step=step: b.add(**step))
        for label, block in wrong_steps(right(3)):
            yield Case(f"{kind}.extend({label})", make, lambda b, block=block: b.extend(block))
    one = right()["obs"]
    yield Case(
        "replay.add(next_obs in the memory of obs)",
        replay,
        lambda b: b.add(**(right() | {"obs": one, "next_obs": one})),
    )
    for label, batch in {"none": None, "a list": [1], "a number": 1, "nothing": {}}.items():
        yield Case(f"replay.extend({label})", replay, lambda b, batch=batch: b.extend(batch))
    yield Case("replay.extend(a staged step)", lambda: staged(replay()), lambda b: b.extend(right(3)))
    yield from environment_cases()
    yield from stage_cases("replay", replay)
    for label, step in wrong_gym_steps():
        yield Case(f"replay.add_step({label})", replay, lambda b, step=step: b.add_step(*step, note=right()["note"]))
    yield Case("replay.add_step(autoreset unknown)", lambda: replay(autoreset=None), add_gym_step)


def staged(buffer: Any) -> Any:
    buffer.stage(action=right()["action"])
    return buffer


def environment_cases() -> Iterator[Case]:
    wrong = {
        "twice": ([0, 0], rl.SchemaError),
        "none of them": ([], rl.SchemaError),
        "floats": ([0.5, 1.0], rl.SchemaError),
        "two axes": ([[0, 1]], rl.SchemaError),
        "text": ("01", rl.SchemaError),
        "bools": ([True, False], rl.SchemaError),
        "one number": (0, rl.SchemaError),
        "ragged": ([[0], [0, 1]], rl.SchemaError),
        "-1": ([0, -1], IndexError),
        "size": ([0, N], IndexError),
        "2^40": ([0, 2**40], IndexError),
        "2^64": ([0, 2**64], rl.SchemaError),
        "fewer than rows": ([1], rl.SchemaError),
    }
    for label, (ids, error) in wrong.items():
        yield Case(f"replay.add(env_ids: {label})", replay, lambda b, ids=ids: b.add(**right(), env_ids=ids), error)
        yield Case(
            f"replay.extend(env_ids: {label})", replay, lambda b, ids=ids: b.extend(right(3), env_ids=ids), error
        )
        if label != "fewer than rows":
            yield Case(f"replay.cut({label})", replay, lambda b, ids=ids: b.cut(ids), error)
            yield Case(f"stats.cut({label})", lambda: replay().stats, lambda s, ids=ids: s.cut(ids), error)


def stage_cases(kind: str, make: Callable[[], Any]) -> Iterator[Case]:
    yield Case(f"{kind}.stage(unknown)", make, lambda b: b.stage(colour=1))
    yield Case(f"{kind}.stage(none)", make, lambda b: b.stage(action=None))
    yield Case(f"{kind}.stage(twice)", lambda: staged(make()), lambda b: b.stage(action=right()["action"]))
    yield Case(f"{kind}.stage(one right, one wrong)", make, lambda b: b.stage(action=right()["action"], reward=[1]))
    for label, wrong in wrong_values(right()["action"]).items():
        if wrong is not None:
            yield Case(f"{kind}.stage({label})", make, lambda b, wrong=wrong: b.stage(action=wrong))


def wrong_gym_steps() -> Iterator[tuple[str, tuple[Any, ...]]]:
    step = right()
    obs, action = step["obs"], step["action"]
    whole = (step["next_obs"], step["reward"], step["terminated"], step["truncated"], {})
    for label, wrong in {
        "none": None,
        "a list": list(whole),
        "four parts": whole[:4],
        "six parts": (*whole, 1),
    }.items():
        yield label, (obs, action, wrong)
    for i, value in enumerate((None, 1.0, [1.0], np.zeros(3), "x")):
        yield f"next_obs {i}", (obs, action, (value, *whole[1:]))
        yield f"reward {i}", (obs, action, (whole[0], value, *whole[2:]))
        yield f"truncated {i}", (obs, action, (*whole[:3], value, {}))
        yield f"obs {i}", (value, action, whole)


def add_gym_step(buffer: Any) -> None:
    step = right()
    gym_step = (step["next_obs"], step["reward"], step["terminated"], step["truncated"], {})
    buffer.add_step(step["obs"], step["action"], gym_step, note=step["note"])


def reading_cases() -> Iterator[Case]:
    sizes = numbers(whole=True) | {"2^31": 2**31, "2^40": 2**40, "2^70": 2**70}
    for label, size in sizes.items():
        for kind in ("replay", "prioritized"):
            yield Case(f"{kind}.sample({label})", REPLAYS[kind], lambda b, size=size: b.sample(size))
    for sampler in (rl.Uniform(), rl.Prioritized(), rl.WithoutReplacement()):
        for view in (rl.Transition(), rl.NStep(3, 0.9), rl.Sequence(3), rl.Window(action=(0, 1))):
            yield Case(
                f"sample before data ({sampler}, {view})",
                lambda sampler=sampler: empty_replay(sampler=sampler),
                lambda b, view=view: b.sample(4, view),
                rl.NotReadyError,
            )
    for view in (rl.NStep(3, 0.9), rl.Sequence(3), hindsight_view(), rl.Window(action=(0, 1))):
        yield Case(f"stored.sample({type(view).__name__})", REPLAYS["stored"], lambda b, view=view: b.sample(4, view))
    for label, view in {"a class": rl.NStep, "text": "n-step", "a number": 3}.items():
        yield Case(f"replay.sample(view: {label})", replay, lambda b, view=view: b.sample(4, view))
    for label, options in {
        "device and out": lambda b: {"device": "cpu", "out": replay().sample(4)},
        "an unknown device": lambda b: {"device": "nowhere"},
        "a number for a device": lambda b: {"device": 1.5},
        "out of another size": lambda b: {"out": replay().sample(5)},
        "out of fewer fields": lambda b: {"out": replay().sample(4).exclude("reward")},
        "out of more fields": lambda b: {"out": replay().sample(4).set("colour", torch.zeros(4))},
        "out of another dtype": lambda b: {"out": replay().sample(4).set("reward", torch.zeros(4).double())},
        "out on another device": lambda b: {"out": replay().sample(4).to("meta")},
        "out that is no batch": lambda b: {"out": [1]},
    }.items():
        yield Case(f"replay.sample({label})", replay, lambda b, options=options: b.sample(4, **options(b)))
    yield Case(
        "without replacement, more than there are",
        lambda: replay(sampler=rl.WithoutReplacement()),
        lambda b: b.sample(17),
        rl.NotReadyError,
    )
    for label, beta in {"NaN": NAN, "-1": -1.0, "infinity": INF, "text": "x", "none": None, "True": True}.items():
        yield Case(
            f"prioritized.sample(beta gives {label})",
            lambda beta=beta: late_beta(beta),
            lambda b: b.sample(4),
        )
    yield from hindsight_cases()
    yield from index_cases()


def late_beta(value: Any) -> rl.ReplayBuffer:
    """Return a buffer whose schedule of beta is valid at first."""
    return replay(sampler=rl.Prioritized(beta=lambda draws: value if draws else 0.5))


def hindsight_view(**options: Any) -> rl.Hindsight:
    def same(achieved: torch.Tensor, goal: torch.Tensor, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return rows["reward"], rows["terminated"]

    return rl.Hindsight(**{"goal": "vector", "achieved": "vector", "fn": same, **options})


def hindsight_cases() -> Iterator[Case]:
    for label, options in {
        "an unknown goal": {"goal": "colour"},
        "an unknown goal, by path": {"goal": ("next_obs", "vector")},
        "an achieved goal of another shape": {"achieved": "image"},
        "fn of no pair": {"fn": lambda achieved, goal, rows: rows["reward"]},
        "fn of none": {"fn": lambda achieved, goal, rows: None},
        "fn of another shape": {"fn": lambda achieved, goal, rows: (rows["reward"][:1], rows["terminated"])},
        "fn of a column": {"fn": lambda achieved, goal, rows: (rows["reward"][:, None], rows["terminated"])},
        "fn of numbers for flags": {"fn": lambda achieved, goal, rows: (rows["reward"], rows["reward"])},
        "fn on another device": {"fn": lambda achieved, goal, rows: (rows["reward"].to("meta"), rows["terminated"])},
        "across episodes": {"view": rl.Sequence(3, cross_episodes=True)},
        "a window of an unknown field": {"view": rl.Window(colour=(0, 1))},
    }.items():
        view = hindsight_view(**options)
        draws = label.startswith("fn")
        yield Case(
            f"replay.sample(hindsight with {label})", replay, lambda b, view=view: b.sample(4, view), draws=draws
        )


WRONG_INDEX: dict[str, tuple[Any, type[Exception]]] = {
    "-1": ([-1], IndexError),
    "size": ([22], IndexError),
    "2^40": ([2**40], IndexError),
    "2^63 - 1": ([2**63 - 1], IndexError),
    "-2^63": ([-(2**63)], IndexError),
    "one right, one never issued": ([20, 2**40], IndexError),
    "2^63": ([2**63], rl.SchemaError),
    "2^64": ([2**64], rl.SchemaError),
    "floats": ([1.0], rl.SchemaError),
    "bools": ([True], rl.SchemaError),
    "int32": (torch.tensor([20], dtype=torch.int32), rl.SchemaError),
    "two axes": ([[20]], rl.SchemaError),
    "none": (None, rl.SchemaError),
    "text": ("x", rl.SchemaError),
    "a slice": (slice(2), rl.SchemaError),
    "meta": (torch.tensor([20]).to("meta"), rl.SchemaError),
    "sparse": (torch.tensor([20]).to_sparse(), rl.SchemaError),
}


def index_cases() -> Iterator[Case]:
    for label, (index, error) in WRONG_INDEX.items():
        yield Case(f"replay[{label}]", replay, lambda b, index=index: b[index], error)
        yield Case(
            f"update_priority(index: {label})",
            prioritized,
            lambda b, index=index, count=2 if "right" in label else 1: b.update_priority(index, [9.0] * count),
            error,
        )
        yield Case(f"distillation[{label}]", distillation, lambda b, index=index: b[index], error)
    yield Case("replay[an overwritten row]", replay, lambda b: b[[0]], IndexError)
    yield Case("replay[one number, overwritten]", replay, lambda b: b[0], IndexError)
    yield Case("distillation[an overwritten row]", distillation, lambda b: b[0], IndexError)
    yield Case("update_priority of uniform draws", replay, lambda b: b.update_priority([20], [1.0]))
    for label, (priority, error) in {
        "NaN": ([1.0, NAN], rl.PriorityError),
        "infinity": ([1.0, INF], rl.PriorityError),
        "-infinity": ([1.0, -INF], rl.PriorityError),
        "-1": ([1.0, -1.0], rl.PriorityError),
        "-1e-300": ([1.0, -1e-300], rl.PriorityError),
        "-1 as an int": ([1, -1], rl.PriorityError),
        "NaN in float32": (torch.tensor([1.0, NAN]), rl.PriorityError),
        "NaN in float16": (torch.tensor([1.0, NAN]).half(), rl.PriorityError),
        "one for two": ([1.0], rl.SchemaError),
        "three for two": ([1.0] * 3, rl.SchemaError),
        "a number": (1.0, rl.SchemaError),
        "a column": ([[1.0], [1.0]], rl.SchemaError),
        "a row": ([[1.0, 1.0]], rl.SchemaError),
        "nothing": ([], rl.SchemaError),
        "none": (None, rl.SchemaError),
        "text": (["x", "y"], rl.SchemaError),
        "bools": ([True, True], rl.SchemaError),
        "complex": ([1j, 1j], rl.SchemaError),
        "meta": (torch.ones(2).to("meta"), rl.SchemaError),
        "sparse": (torch.ones(2).to_sparse(), rl.SchemaError),
        "eight-bit floats": (torch.ones(2).to(torch.float8_e4m3fn), rl.SchemaError),
    }.items():
        yield Case(
            f"update_priority({label})", prioritized, lambda b, p=priority: b.update_priority([18, 20], p), error
        )


# Constructors


WRONG_FIELDS: dict[str, Any] = {
    "0": 0,
    "-1": -1,
    "True": True,
    "1.5": 1.5,
    "text": "3",
    "none": None,
    "a shape with 0": (3, 0),
    "a shape with -1": (-1,),
    "a shape with 1.5": (1.5,),
    "an empty dict": {},
    "a dict of nothing": {"a": {}},
    "a key that is no name": {1: 3},
    "an empty name": {"": 3},
    "a list": [3],
    "a class": rl.Field,
}


def making_cases() -> Iterator[Case]:
    def makes(name: str, make: Callable[[], object], error: type[Exception] = rl.SchemaError) -> Case:
        return Case(name, nothing, lambda _: make(), error)

    make_subject = {
        "ReplayBuffer": lambda **o: rl.ReplayBuffer(**{"capacity": 8, **DECLARED, "num_envs": N, **o}),
        "RolloutBuffer": lambda **o: rl.RolloutBuffer(**{"num_steps": 8, **DECLARED, "num_envs": N, **o}),
        "DistillationBuffer": lambda **o: rl.DistillationBuffer(**{"capacity": 8, **DECLARED, **o}),
    }
    for kind, make in make_subject.items():
        size = "num_steps" if kind == "RolloutBuffer" else "capacity"
        optional = "action" if kind == "DistillationBuffer" else ""
        for label, wrong in numbers(whole=True).items():
            yield makes(f"{kind}({size}: {label})", lambda make=make, size=size, wrong=wrong: make(**{size: wrong}))
            if label != "none" and kind != "DistillationBuffer":
                yield makes(f"{kind}(num_envs: {label})", lambda make=make, wrong=wrong: make(num_envs=wrong))
        for label, wrong in WRONG_FIELDS.items():
            for field in ("obs", "action"):
                if not (wrong is None and field == optional):
                    yield makes(f"{kind}({field}: {label})", lambda make=make, f=field, wrong=wrong: make(**{f: wrong}))
            yield makes(f"{kind}(extra: {label})", lambda make=make, wrong=wrong: make(extra={"x": wrong}))
        for name in ("obs", "action", "index", "self"):
            yield makes(f"{kind}(extra named {name})", lambda make=make, name=name: make(extra={name: 1}))
        for label, seed in {"-1": -1, "1.5": 1.5, "True": True, "text": "x"}.items():
            yield makes(f"{kind}(seed: {label})", lambda make=make, seed=seed: make(seed=seed))
        for label, device in {"unknown": "nowhere", "1.5": 1.5, "none": None}.items():
            yield makes(f"{kind}(device: {label})", lambda make=make, device=device: make(device=device))
    for kind, make in list(make_subject.items())[:2]:
        for label, options in {
            "an int reward": {"reward": rl.Field((), torch.int64)},
            "an unknown autoreset": {"autoreset": "sometimes"},
            "autoreset: 1": {"autoreset": 1},
            "stats of another number": {"stats": rl.EpisodeStats(N + 1)},
            "stats that are none": {"stats": 3},
            "a norm of another shape": {"norm": {("obs", "vector"): rl.RunningNorm(4)}},
            "a norm of an unknown field": {"norm": {"colour": rl.RunningNorm(3)}},
            "a norm of two leaves": {"norm": {"obs": rl.RunningNorm(3)}},
            "a norm that is none": {"norm": {("obs", "vector"): 3}},
        }.items():
            yield makes(f"{kind}({label})", lambda make=make, options=options: make(**options))
    replay_of = make_subject["ReplayBuffer"]
    for label, options in {
        "a capacity that does not divide": {"capacity": 7},
        "next_obs: maybe": {"next_obs": "maybe"},
        "a class for a sampler": {"sampler": rl.Uniform},
        "a number for a sampler": {"sampler": 3},
        "stacks with stored next_obs": {"obs": rl.Stacked(rl.Field(3), 2), "next_obs": "stored"},
        "a stacked action": {"action": rl.Stacked(rl.Field(3), 2)},
    }.items():
        yield makes(f"ReplayBuffer({label})", lambda options=options: replay_of(**options))
    yield makes("ReplayBuffer(more than memory)", lambda: replay_of(capacity=2**40), MemoryError)
    yield makes(
        "DistillationBuffer(more than memory)", lambda: make_subject["DistillationBuffer"](capacity=2**40), MemoryError
    )
    yield makes("RolloutBuffer(more than memory)", lambda: make_subject["RolloutBuffer"](num_steps=2**40), MemoryError)
    yield from description_cases(makes)


def description_cases(makes: Callable[..., Case]) -> Iterator[Case]:
    """Fields, samplers, views, statistics and norms."""
    for label, wrong in numbers(whole=True).items():
        yield makes(f"NStep(n: {label})", lambda wrong=wrong: rl.NStep(wrong, 0.9))
        yield makes(f"Sequence(length: {label})", lambda wrong=wrong: rl.Sequence(wrong))
        if label not in ("0", "-1"):
            yield makes(f"Window(action: one is {label})", lambda wrong=wrong: rl.Window(action=(0, wrong)))
        yield makes(f"Stacked(k: {label})", lambda wrong=wrong: rl.Stacked(3, wrong))
        yield makes(f"EpisodeStats(window: {label})", lambda wrong=wrong: rl.EpisodeStats(2, window=wrong))
        if label != "none":
            yield makes(f"EpisodeStats(num_envs: {label})", lambda wrong=wrong: rl.EpisodeStats(wrong))
        if label != "0":
            yield makes(f"Sequence(burn_in: {label})", lambda wrong=wrong: rl.Sequence(2, burn_in=wrong))
    for label, wrong in numbers(whole=False).items():
        yield makes(f"Window.from_seconds(fps: {label})", lambda fps=wrong: rl.Window.from_seconds(fps, obs=[0.0]))
        yield makes(f"RunningNorm(eps: {label})", lambda wrong=wrong: rl.RunningNorm(3, eps=wrong))
        if label != "none":
            yield makes(f"RunningNorm(clip: {label})", lambda wrong=wrong: rl.RunningNorm(3, clip=wrong))
        if label != "0":
            for name in ("alpha", "beta", "eps"):
                yield makes(f"Prioritized({name}: {label})", lambda n=name, w=wrong: rl.Prioritized(**{n: w}))
    for label, wrong in fractions().items():
        yield makes(f"NStep(gamma: {label})", lambda wrong=wrong: rl.NStep(3, wrong))
        yield makes(f"Hindsight(ratio: {label})", lambda wrong=wrong: hindsight_view(ratio=wrong))
    for label, make in {
        "Stacked(k: 1)": lambda: rl.Stacked(3, 1),
        "Stacked(axis outside)": lambda: rl.Stacked(3, 4, axis=2),
        "Stacked(pad: mirror)": lambda: rl.Stacked(3, 4, pad="mirror"),
        "Stacked(a dict)": lambda: rl.Stacked({"a": 3}, 4),
        "Field(an unknown dtype)": lambda: rl.Field(3, "nothing"),  # type: ignore[arg-type]
        "Field(text)": lambda: rl.Field(3, str),
        "Field(eight-bit floats)": lambda: rl.Field(3, torch.float8_e4m3fn),
        "Hindsight(strategy)": lambda: hindsight_view(strategy="past"),
        "Prioritized(normalize)": lambda: rl.Prioritized(normalize="never"),  # type: ignore[arg-type]
        "Prioritized(a power beyond float64)": lambda: rl.Prioritized(alpha=4.0, eps=1e100),
        "EpisodeStats(metrics: text)": lambda: rl.EpisodeStats(2, metrics="speed"),
        "EpisodeStats(metrics: numbers)": lambda: rl.EpisodeStats(2, metrics=[1]),  # type: ignore[list-item]
        "EpisodeStats(a taken name)": lambda: rl.EpisodeStats(2, metrics=["return"]),
        "EpisodeStats(a name twice)": lambda: rl.EpisodeStats(2, metrics=["speed"], reasons=["speed"]),
        "EpisodeStats(an unknown device)": lambda: rl.EpisodeStats(2, device="nowhere"),
        "RunningNorm(an unknown device)": lambda: rl.RunningNorm(2, device="nowhere"),
        "RunningNorm(shape: -1)": lambda: rl.RunningNorm(-1),
        "RunningNorm(shape: 1.5)": lambda: rl.RunningNorm(1.5),  # type: ignore[arg-type]
        "Memory.of(an unknown device)": lambda: rl.Memory.of("nowhere"),
    }.items():
        yield makes(label, make)


# Rollout buffers


def values() -> dict[str, Any]:
    fields = right() | {"value": np.ones(N, np.float32), "log_prob": np.ones(N, np.float32)}
    fields.pop("next_obs")
    return fields


def rollout(steps: int = 3, truncated: bool = False, **options: Any) -> rl.RolloutBuffer:
    listeners = {"stats": rl.EpisodeStats(N), "norm": {("obs", "vector"): rl.RunningNorm(3)}}
    settings = {**DECLARED, "num_envs": N, "seed": 0, "autoreset": "Disabled", **listeners, **options}
    make_subject = rl.RolloutBuffer(4, **settings)
    for t in range(steps):
        step = values()
        step["obs"]["vector"][:] = t
        step["truncated"][:] = truncated and t == 1
        make_subject.add(**step, **({"final_obs": right()["obs"]} if truncated else {}))
    if steps:
        make_subject.attach(mark=torch.ones(steps, N))
    return make_subject


def empty_rollout() -> rl.RolloutBuffer:
    return rollout(0)


def beside() -> dict[str, Any]:
    """Return the arguments of add_step other than the step."""
    return {name: values()[name] for name in ("note", "value", "log_prob")}


def rollout_cases() -> Iterator[Case]:
    for label, step in wrong_steps(values(), optional=("value", "log_prob")):
        yield Case(f"rollout.add({label})", rollout, lambda b, step=step: b.add(**step))
    for name in ("value", "log_prob"):
        yield Case(f"rollout.add({name} left out)", rollout, lambda b, name=name: b.add(**(values() | {name: None})))
    yield Case("rollout.add(value given late)", without_values, lambda b: b.add(**values()))
    yield Case("rollout.stage(value given late)", without_values, lambda b: b.stage(value=values()["value"]))
    yield Case("rollout.add after full", lambda: rollout(4), lambda b: b.add(**values()), rl.BufferFullError)
    yield Case("rollout.stage after full", lambda: rollout(4), lambda b: b.stage(action=[1, 1]), rl.BufferFullError)
    yield Case("rollout.add_step after full", lambda: rollout(4), add_gym_step, rl.BufferFullError)
    yield Case("rollout.add_step(autoreset unknown)", lambda: rollout(autoreset=None), add_gym_step)
    yield Case(
        "rollout.add(final_obs under NEXT_STEP)",
        lambda: rollout(autoreset="NextStep"),
        lambda b: b.add(**values(), final_obs=right()["obs"]),
    )
    ends = np.array([False, True])
    for label, final in {"a number": 1, "one row": {k: v[:1] for k, v in right()["obs"].items()}, "{}": {}}.items():
        yield Case(
            f"rollout.add(final_obs: {label})",
            rollout,
            lambda b, final=final: b.add(**(values() | {"truncated": ends}), final_obs=final),
        )
    for label, step in wrong_gym_steps():
        if label != "next_obs 0":  # next_obs is checked only if it is passed
            yield Case(f"rollout.add_step({label})", rollout, lambda b, step=step: b.add_step(*step, **beside()))
    yield from stage_cases("rollout", rollout)
    for label, count in {"-1": -1, "5": 5, "1.5": 1.5, "True": True, "text": "x"}.items():
        yield Case(f"rollout.take_back({label})", rollout, lambda b, count=count: b.take_back(count))
    yield from advantage_cases()
    yield from minibatch_cases()


def advantage_cases() -> Iterator[Case]:
    right_last = np.ones(N, np.float32)
    for label, last in wrong_values(right_last).items():
        yield Case(f"compute_advantage({label})", rollout, lambda b, last=last: b.compute_advantage(last))
        if last is not None:
            yield Case(
                f"compute_advantage(final_value: {label})",
                lambda: rollout(truncated=True),
                lambda b, last=last: b.compute_advantage(right_last, final_value=last),
            )
            yield Case(
                f"compute_advantage(last_obs: {label})",
                rollout,
                lambda b, last=last: b.compute_advantage(right_last, last_obs=last),
            )
    for name in ("gamma", "lam"):
        for label, wrong in (fractions() | {"none": None}).items():
            yield Case(
                f"compute_advantage({name}: {label})",
                rollout,
                lambda b, name=name, wrong=wrong: b.compute_advantage(right_last, **{name: wrong}),
            )
    for label, make in {
        "before data": empty_rollout,
        "of a staged step": lambda: staged(rollout()),
        "without final values": lambda: rollout(truncated=True),
        "without values": without_values,
    }.items():
        yield Case(f"compute_advantage {label}", make, lambda b: b.compute_advantage(right_last), rl.NotReadyError)
    yield Case(
        "compute_advantage(final_value of ends)",
        lambda: rollout(truncated=True),
        lambda b: b.compute_advantage(right_last, final_value=right_last, bootstrap_truncated=False),
    )


def without_values() -> rl.RolloutBuffer:
    make_subject = empty_rollout()
    step = values()
    step.pop("value")
    make_subject.add(**step)
    return make_subject


def minibatch_cases() -> Iterator[Case]:
    for label, wrong in numbers(whole=True).items():
        yield Case(f"minibatches({label})", rollout, lambda b, wrong=wrong: list(b.minibatches(wrong)))
        yield Case(
            f"minibatches(epochs: {label})", rollout, lambda b, wrong=wrong: list(b.minibatches(2, epochs=wrong))
        )
        yield Case(f"sequences(epochs: {label})", rollout, lambda b, wrong=wrong: list(b.sequences(2, epochs=wrong)))
        if label != "none":
            yield Case(f"sequences({label})", rollout, lambda b, wrong=wrong: list(b.sequences(wrong)))
            yield Case(
                f"sequences(batch_size: {label})", rollout, lambda b, w=wrong: list(b.sequences(2, batch_size=w))
            )
    for label, options in {
        "an unknown field": {"fields": ["colour"]},
        "an unknown leaf": {"fields": [("obs", "sound")]},
        "an unknown device": {"device": "nowhere"},
    }.items():
        yield Case(f"minibatches({label})", rollout, lambda b, options=options: list(b.minibatches(2, **options)))
        yield Case(f"sequences({label})", rollout, lambda b, options=options: list(b.sequences(2, **options)))
    for label, options in {"mode": {"mode": "random"}, "layout": {"layout": "columns"}}.items():
        yield Case(f"sequences({label})", rollout, lambda b, options=options: list(b.sequences(2, **options)))
    for label, out in {
        "another size": lambda b: next(b.minibatches(3, shuffle=False)),
        "fewer fields": lambda b: next(b.minibatches(2, fields=["obs"], shuffle=False)),
        "its own memory": lambda b: TensorDict({"reward": b.data["reward"][0]}, batch_size=[2]),
        "no batch": lambda b: [1],
    }.items():
        yield Case(f"minibatches(out: {label})", rollout, lambda b, out=out: list(b.minibatches(2, out=out(b))))
    yield Case(
        "minibatches(out of its own memory, one field)",
        rollout,
        lambda b: b.minibatches(2, fields=["reward"], out=TensorDict({"reward": b.data["reward"][0]}, batch_size=[2])),
    )
    for label, read in {
        "minibatches": lambda b: list(b.minibatches(2)),
        "sequences": lambda b: list(b.sequences(2)),
        "data": lambda b: b.data,
        "env_major": lambda b: b.env_major(),
        "attach": lambda b: b.attach(x=torch.zeros(1, N)),
        "[]": lambda b: b["reward"],
    }.items():
        yield Case(f"rollout: {label} before data", empty_rollout, read, rl.NotReadyError)
    yield Case("minibatches larger than all", rollout, lambda b: b.minibatches(9, drop_last=True), rl.NotReadyError)
    yield Case("env_major of a staged step", lambda: staged(rollout()), lambda b: b.env_major(), rl.NotReadyError)
    yield Case("rollout[unknown]", rollout, lambda b: b["colour"], KeyError)
    yield Case("rollout[unknown path]", rollout, lambda b: b["obs", "sound"], KeyError)
    for label, named in {
        "a field's name": {"reward": torch.zeros(3, N)},
        "index": {"index": torch.zeros(3, N)},
        "a name that is none": {1: torch.zeros(3, N)},
        "an empty dict": {"x": {}},
        "a row less": {"x": torch.zeros(2, N)},
        "one column": {"x": torch.zeros(3, 1)},
        "transposed": {"x": torch.zeros(N, 3)},
        "a number": {"x": 1.0},
        "text": {"x": "x"},
        "meta": {"x": torch.zeros(3, N, device="meta")},
        "none": {"x": None},
        "one right, one wrong": {"x": torch.zeros(3, N), "y": torch.zeros(3)},
    }.items():
        yield Case(f"attach({label})", rollout, lambda b, named=named: b.attach(named))


# Distillation buffers


def distillation(**options: Any) -> rl.DistillationBuffer:
    """Return a buffer of five rows in two rounds; ids 0 to 21 are overwritten."""
    make_subject = rl.DistillationBuffer(5, **{"obs": 3, "action": rl.Field((), torch.int64), "seed": 0, **options})
    make_subject.add(np.ones((20, 3)), np.ones(20, np.int64))
    make_subject.next_round()
    make_subject.add(np.full((2, 3), 2.0), [2, 2])
    return make_subject


def empty_distillation() -> rl.DistillationBuffer:
    return rl.DistillationBuffer(5, obs=3)


def distillation_cases() -> Iterator[Case]:
    fields = {"obs": np.ones((2, 3), np.float32), "action": np.ones(2, np.int64)}
    for label, row in wrong_steps(fields):  # obs with another number of rows, beside two actions
        yield Case(f"distillation.add({label})", distillation, lambda b, row=row: b.add(**row))
    for label, row in {
        "an action of nothing": {"obs": [[1, 2, 3]], "action": None},
        "text for an action": {"obs": [[1, 2, 3]], "action": ["x"]},
        "an unknown device": {"obs": [[1, 2, 3]], "action": torch.zeros(1, device="meta")},
        "a reserved field": {"obs": [[1, 2, 3]], "action": [1], "round": [1]},
        "fewer actions": {"obs": [[1, 2, 3], [1, 2, 3]], "action": [1]},
        "an obs of another shape": {"obs": [[1, 2]], "action": [1]},
    }.items():
        yield Case(f"first distillation.add({label})", empty_distillation, lambda b, row=row: b.add(**row))
    for label, wrong in numbers(whole=True).items():
        yield Case(f"distillation.sample({label})", distillation, lambda b, wrong=wrong: b.sample(wrong))
        yield Case(f"distillation.epochs({label})", distillation, lambda b, wrong=wrong: b.epochs(wrong))
        yield Case(f"epochs(epochs: {label})", distillation, lambda b, wrong=wrong: b.epochs(2, epochs=wrong))
        yield Case(f"fill(batch_size: {label})", distillation, lambda b, w=wrong: b.fill(rollout(), batch_size=w))
        if label != "none":
            yield Case(f"sample(recent: {label})", distillation, lambda b, wrong=wrong: b.sample(2, recent=wrong))
            yield Case(f"epochs(recent: {label})", distillation, lambda b, wrong=wrong: b.epochs(2, recent=wrong))
        if label != "a list":
            yield Case(f"sample(recent of {label})", distillation, lambda b, w=wrong: b.sample(2, recent={w: 0.5}))
    for label, wrong in (fractions() | {"none": None}).items():
        yield Case(f"sample(a share of {label})", distillation, lambda b, wrong=wrong: b.sample(2, recent={1: wrong}))
        yield Case(f"mix(beta: {label})", distillation, lambda b, wrong=wrong: b.mix([1, 1], [2, 2], wrong))
        yield Case(f"mix(beta gives {label})", distillation, lambda b, w=wrong: b.mix([1, 1], [2, 2], lambda _: w))
    yield Case("sample(shares beyond 1)", distillation, lambda b: b.sample(2, recent={1: 0.7, 2: 0.7}))
    yield Case("distillation.sample(2^40)", distillation, lambda b: b.sample(2**40))
    for label, pair in {
        "another number": ([1, 1], [2, 2, 2]),
        "a number for two": ([1, 1], 2),
        "none": ([1, 1], None),
        "floats": ([1, 1], [0.5, 0.5]),
        "two axes": ([[1, 1]], [[1, 1]]),
    }.items():
        yield Case(f"mix({label})", distillation, lambda b, pair=pair: b.mix(*pair, 0.5))
    for label, read in {
        "sample": lambda b: b.sample(2),
        "epochs": lambda b: b.epochs(2),
        "mix": lambda b: b.mix([1], [1], 0.5),
        "fill": lambda b: b.fill(empty_replay()),
    }.items():
        yield Case(f"distillation.{label} before data", empty_distillation, read, rl.NotReadyError)
    yield Case("epochs larger than all", distillation, lambda b: b.epochs(9, drop_last=True), rl.NotReadyError)
    for label, options in {
        "device and out": lambda b: {"device": "cpu", "out": distillation().sample(2)},
        "an unknown device": lambda b: {"device": "nowhere"},
        "out of another size": lambda b: {"out": distillation().sample(3)},
        "out of fewer fields": lambda b: {"out": distillation().sample(2).exclude("round")},
        "out that is no batch": lambda b: {"out": [1]},
    }.items():
        yield Case(f"distillation.sample({label})", distillation, lambda b, o=options: b.sample(2, **o(b)))
        yield Case(f"distillation.epochs({label})", distillation, lambda b, o=options: list(b.epochs(2, **o(b))))
    for label, source in {"a list": lambda: [1], "another buffer": distillation, "another schema": rollout}.items():
        yield Case(f"fill({label})", distillation, lambda b, source=source: b.fill(source()))
    for label, answer in {
        "none": None,
        "text": "x",
        "another shape": torch.zeros(2, 2),
        "meta": torch.zeros(2).to("meta"),
    }.items():
        yield Case(f"fill(a teacher says {label})", distillation, lambda b, a=answer: b.fill(vectors(), lambda _: a))
    yield Case(
        "fill(a teacher fails late)", distillation, lambda b: b.fill(vectors(), Failing(), batch_size=2), KeyError
    )


class Failing:
    """A teacher that returns a valid result for the first batch only."""

    calls = 0

    def __call__(self, obs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 1:
            raise KeyError("teacher: expected the first batch, got another. This is the test's own.")
        return torch.ones(len(obs), dtype=torch.int64)


def vectors() -> rl.ReplayBuffer:
    make_subject = rl.ReplayBuffer(8, obs=3, action=rl.Field((), torch.int64))
    for t in range(6):
        make_subject.add([t, t, t], t, 0.0, False, False, [t + 1] * 3)
    return make_subject


# Statistics, norms


def stats() -> rl.EpisodeStats:
    make_subject = rl.EpisodeStats(N, window=3, metrics=("speed",), reasons=("fall",))
    make_subject.update(
        [1.0, 2.0], [True, False], [False, False], metrics={"speed": [1.0, 1.0]}, reasons=["fall", None]
    )
    return make_subject


def norm() -> rl.RunningNorm:
    make_subject = rl.RunningNorm(3)
    make_subject.update([[1.0, 2.0, 3.0], [4.0, 5.0, 7.0]])
    return make_subject


def listener_cases() -> Iterator[Case]:
    step = {"reward": np.ones(N), "terminated": np.zeros(N, bool), "truncated": np.zeros(N, bool)}
    more = {"mask": np.ones(N, bool)}
    for label, wrong in wrong_steps(step | more, optional=("mask",)):
        if label != "an unknown field":
            yield Case(f"stats.update({label})", stats, lambda s, wrong=wrong: s.update(**wrong))
    for label, options in {
        "an unknown metric": {"metrics": {"height": [1.0, 1.0]}},
        "a metric of one": {"metrics": {"speed": [1.0]}},
        "text for a metric": {"metrics": {"speed": ["x", "y"]}},
        "a metric that is none": {"metrics": {"speed": None}},
        "an unknown reason": {"reasons": ["flight", None]},
        "one reason": {"reasons": ["fall"]},
        "text for reasons": {"reasons": "fall"},
        "reasons as numbers": {"reasons": {"fall": [1, 0]}},
        "an unknown flag": {"reasons": {"flight": [True, False]}},
        "metrics as a list": {"metrics": [1.0]},
        "reasons as a number": {"reasons": 3},
    }.items():
        yield Case(f"stats.update({label})", stats, lambda s, options=options: s.update(**step, **options))
    for label, wrong in {"nothing": {}, "other arguments": rl.EpisodeStats(3).snapshot(), "none": None}.items():
        yield Case(f"stats.restore({label})", stats, lambda s, wrong=wrong: s.restore(wrong))
    yield Case("stats.to(an unknown device)", stats, lambda s: s.to("nowhere"))
    for label, x in {
        "another width": np.ones((2, 4)),
        "one column": np.ones((2, 1)),
        "a number": 1.0,
        "complex": np.ones((2, 3), complex),
        "text": "x",
        "none": None,
        "meta": torch.ones(2, 3, device="meta"),
        "sparse": torch.ones(2, 3).to_sparse(),
        "eight-bit floats": torch.ones(2, 3).to(torch.float8_e4m3fn),
    }.items():
        for name in ("update", "normalize", "scale", "denormalize", "__call__"):
            yield Case(f"norm.{name}({label})", norm, lambda n, name=name, x=x: getattr(n, name)(x))
    for label, mask in wrong_values(np.ones(2, bool)).items():
        if mask is not None:
            yield Case(f"norm.update(mask: {label})", norm, lambda n, mask=mask: n.update(np.ones((2, 3)), mask))
    for label, wrong in {"nothing": {}, "another shape": rl.RunningNorm(4).snapshot(), "none": None}.items():
        yield Case(f"norm.restore({label})", norm, lambda n, wrong=wrong: n.restore(wrong))
    for label, wrong in {"another shape": rl.RunningNorm(4), "none": None, "a number": 3}.items():
        yield Case(f"norm.merge({label})", norm, lambda n, wrong=wrong: n.merge(wrong))
    yield Case("norm.to(an unknown device)", norm, lambda n: n.to("nowhere"))


# Estimators


def arguments() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    reward, value, next_value, log_ratio = torch.randn(4, 5, 3, generator=generator)
    flags = {"terminated": reward > 1, "truncated": value > 1}
    return {"reward": reward, "value": value, "next_value": next_value, "log_ratio": log_ratio, **flags}


ESTIMATORS: dict[str, tuple[Callable[..., Any], tuple[str, ...], dict[str, float]]] = {
    "gae": (rl.gae, ("reward", "value", "next_value", "terminated", "truncated"), {"gamma": 0.9, "lam": 0.8}),
    "lambda_return": (
        rl.lambda_return,
        ("reward", "next_value", "terminated", "truncated"),
        {"gamma": 0.9, "lam": 0.8},
    ),
    "n_step_return": (rl.n_step_return, ("reward", "next_value", "terminated", "truncated"), {"gamma": 0.9}),
    "discounted_return": (rl.discounted_return, ("reward", "terminated", "truncated"), {"gamma": 0.9}),
    "vtrace": (
        rl.vtrace,
        ("log_ratio", "reward", "value", "next_value", "terminated", "truncated"),
        {"gamma": 0.9, "lam": 0.8},
    ),
}


def estimator_cases() -> Iterator[Case]:
    for name, (function, tensors, settings) in ESTIMATORS.items():
        more = {"n": 2} if name == "n_step_return" else {}

        def call(
            given: dict[str, Any], f: Any = function, t: Any = tensors, s: Any = settings | more, **o: Any
        ) -> None:
            f(**{key: given[key] for key in t}, **{**s, **o})

        for tensor in tensors:
            is_flag = tensor in ("terminated", "truncated")
            wrong: dict[str, Callable[[torch.Tensor], Any]] = {
                "an array": lambda x: x.numpy(),
                "none": lambda x: None,
                "a number": lambda x: 1.0,
                "a list": lambda x: x.tolist(),
                "a column": lambda x: x[:, :1],
                "a row": lambda x: x[:1],
                "an axis more": lambda x: x[..., None],
                "without time": lambda x: x[0],
                "a scalar": lambda x: x[0, 0],
                "transposed": lambda x: x.T,
                "meta": lambda x: x.to("meta"),
                "sparse": lambda x: x.float().to_sparse(),
                "another kind": (lambda x: x.float()) if is_flag else (lambda x: x.to(torch.complex64)),
            }
            if tensors[:2] == ("reward", "terminated") and tensor == "reward":
                del wrong["an axis more"]  # a third axis is one of agents
            for label, change in wrong.items():
                yield Case(
                    f"{name}({tensor}: {label})",
                    arguments,
                    lambda given, call=call, tensor=tensor, change=change: call(
                        given | {tensor: change(given[tensor])}
                    ),
                )
        for setting in settings:
            for label, value in (fractions() | {"none": None, "a tensor": torch.tensor(0.5)}).items():
                yield Case(
                    f"{name}({setting}: {label})",
                    arguments,
                    lambda given, call=call, setting=setting, value=value: call(given, **{setting: value}),
                )
        yield Case(f"{name}(mask of floats)", arguments, lambda given, call=call: call(given, mask=torch.ones(5, 3)))
        yield Case(
            f"{name}(a short mask)", arguments, lambda given, call=call: call(given, mask=torch.ones(4, 3).bool())
        )
    for label, n in numbers(whole=True).items():
        yield Case(f"n_step_return(n: {label})", arguments, lambda given, n=n: n_steps(given, n))
    for label, last in {
        "a number": 0.0,
        "a column": torch.zeros(3, 1),
        "text": "x",
        "meta": torch.zeros(3).to("meta"),
    }.items():
        yield Case(
            f"discounted_return(last_value: {label})",
            arguments,
            lambda given, last=last: rl.discounted_return(
                given["reward"], given["terminated"], given["truncated"], gamma=0.9, last_value=last
            ),
        )
    for label, options in {
        "1": {"group_size": 1},
        "2 of 3": {"group_size": 2},
        "1.5": {"group_size": 1.5},
        "True": {"group_size": True},
        "gamma 2": {"group_size": 3, "gamma": 2.0},
        "eps text": {"group_size": 3, "eps": "x"},
    }.items():
        yield Case(
            f"group_advantage({label})",
            arguments,
            lambda given, options=options: rl.group_advantage(given["reward"], given["terminated"], **options),
        )
    yield Case("normalize(an array)", arguments, lambda given: rl.normalize(given["reward"].numpy()))
    yield Case("normalize(a short mask)", arguments, lambda g: rl.normalize(g["reward"], g["terminated"][:4]))
    yield Case("normalize(eps)", arguments, lambda given: rl.normalize(given["reward"], eps="x"))  # type: ignore[arg-type]
    yield Case("explained_variance(a row)", arguments, lambda g: rl.explained_variance(g["value"], g["reward"][:1]))
    yield Case("explained_variance(none)", arguments, lambda g: rl.explained_variance(g["value"], None))  # type: ignore[arg-type]


def n_steps(given: dict[str, Any], n: Any) -> None:
    rl.n_step_return(given["reward"], given["next_value"], given["terminated"], given["truncated"], gamma=0.9, n=n)


def huge_cases() -> Iterator[Case]:
    """Sizes beyond any memory or any integer type."""

    def makes(name: str, make: Callable[[], object], error: type[Exception] = rl.SchemaError) -> Case:
        return Case(name, nothing, lambda _: make(), error)

    most = {"2^63": 2**63, "2^70": 2**70, "10^400": 10**400}
    for label, huge in most.items():
        yield Case(f"replay.save(keep: {label})", replay, lambda b, huge=huge: b.save("never", keep=huge))
        yield makes(f"ReplayBuffer(capacity: {label})", lambda huge=huge: rl.ReplayBuffer(huge, 1, 1))
        yield makes(f"ReplayBuffer(num_envs: {label})", lambda huge=huge: rl.ReplayBuffer(8, 1, 1, num_envs=huge))
        yield makes(f"RolloutBuffer(num_steps: {label})", lambda huge=huge: rl.RolloutBuffer(huge, N, 1, 1))
        yield makes(f"DistillationBuffer(capacity: {label})", lambda huge=huge: rl.DistillationBuffer(huge, 1, 1))
        yield makes(f"ReplayBuffer(obs: {label})", lambda huge=huge: rl.ReplayBuffer(8, huge, 1), MemoryError)
        yield makes(f"EpisodeStats(window: {label})", lambda huge=huge: rl.EpisodeStats(N, window=huge))
        yield makes(f"EpisodeStats(num_envs: {label})", lambda huge=huge: rl.EpisodeStats(huge))
        yield makes(f"RunningNorm({label})", lambda huge=huge: rl.RunningNorm(huge), MemoryError)
        yield makes(f"Recent({label})", lambda huge=huge: rl.Recent(huge))
        yield makes(f"NewFirst(length: {label})", lambda huge=huge: rl.NewFirst(length=huge))
        yield makes(f"Window({label})", lambda huge=huge: rl.Window(action=(0, huge)))
        yield makes(f"Window(-{label})", lambda huge=huge: rl.Window(action=(-huge, 0)))
        yield Case(f"prefetch(depth: {label})", replay, lambda b, huge=huge: rl.prefetch(b, 4, depth=huge))
        yield Case(f"prefetch({label})", replay, lambda b, huge=huge: rl.prefetch(b, huge))
        yield Case(f"minibatches(epochs: {label})", rollout, lambda b, huge=huge: next(b.minibatches(2, epochs=huge)))
        yield Case(f"sequences(epochs: {label})", rollout, lambda b, huge=huge: next(b.sequences(2, epochs=huge)))
        yield Case(f"sequences(length: {label})", rollout, lambda b, huge=huge: next(b.sequences(huge)))
        yield Case(f"limit(min_size: {label})", replay, lambda b, huge=huge: limited(b, min_size=huge))
    for name in ("alpha", "beta", "eps"):
        yield makes(f"Prioritized({name}: 10^400)", lambda name=name: rl.Prioritized(**{name: 10**400}))
    yield Case("prioritized.sample(beta gives 10^400)", lambda: late_beta(10**400), lambda b: b.sample(4))
    yield makes("NStep(gamma: 10^400)", lambda: rl.NStep(2, 10**400))
    yield makes("Mixture(10^400)", lambda: rl.Mixture({"a": replay(), "b": prioritized()}, {"a": 10**400, "b": 1}))
    for name in ("samples_per_insert", "tolerance", "timeout"):
        yield Case(f"limit({name}: 10^400)", replay, lambda b, name=name: limited(b, **{name: 10**400}))
    yield makes("EpisodeStats(window: 2^62)", lambda: rl.EpisodeStats(N, window=2**62), MemoryError)
    yield makes("EpisodeStats(num_envs: 2^62)", lambda: rl.EpisodeStats(2**62), MemoryError)
    yield makes("RunningNorm(2^62)", lambda: rl.RunningNorm(2**62), MemoryError)
    yield Case("prefetch(depth: 2^62)", replay, lambda b: rl.prefetch(b, 4, depth=2**62))
    yield Case("sequences(length: 2^62)", rollout, lambda b: next(b.sequences(2**62)), MemoryError)
    for kind in ("replay", "prioritized"):
        views = {"": None, "NStep": rl.NStep(3, 0.9), "Sequence": rl.Sequence(3), "Window": rl.Window(action=(0, 1))}
        for label, view in views.items():
            name = f"{kind}.sample(2^31 - 1, {label})"
            yield Case(name, REPLAYS[kind], lambda b, view=view: b.sample(2**31 - 1, view), MemoryError)
        for label, length in {"2^30": 2**30, "2^62": 2**62, "2^70": 2**70}.items():
            name, call = f"{kind}.sample(Sequence({label}))", lambda b, n=length: b.sample(4, rl.Sequence(n))
            yield Case(name, REPLAYS[kind], call, MemoryError)


def limited(replay: rl.ReplayBuffer, **options: Any) -> rl.RateLimit:
    return rl.RateLimit(replay, **{"samples_per_insert": 1, "tolerance": 100, **options})


CASES = [
    *making_cases(),
    *huge_cases(),
    *replay_cases(),
    *reading_cases(),
    *rollout_cases(),
    *distillation_cases(),
    *listener_cases(),
    *estimator_cases(),
]


subjects: dict[tuple[str, Callable[[], Any]], tuple[Any, str]] = {}
"""Objects with their digest, reused by the next case if a case left them unchanged."""


@pytest.fixture(scope="module", autouse=True)
def forget() -> Iterator[None]:
    yield
    subjects.clear()


def complaint(case: Case, backend: str = "") -> str | None:
    """Return a description of a badly refused call; None for a good refusal."""
    subject, before = subjects.pop((backend, case.make), None) or make_subject(case)
    try:
        case.call(subject)
    except Exception as error:
        if not isinstance(error, case.error):
            return f"{type(error).__name__} instead of {case.error.__name__}: {error}"
        words = str(error.args[0] if isinstance(error, KeyError) else error)
        if not FORM.fullmatch(words):
            return f"in other words: {words}"
    else:
        return "it was taken"
    if case.draws:
        subject.check()
        return None
    if digest(subject) != before:
        return "something has changed"
    subjects[backend, case.make] = subject, before
    return None


def make_subject(case: Case) -> tuple[Any, str]:
    subject = case.make()
    return subject, digest(subject)


@pytest.mark.promise("G")
@pytest.mark.parametrize("called", sorted({case.called for case in CASES}))
def test_wrong_calls_are_refused_and_change_nothing(called: str) -> None:
    complaints = {}
    for backend, chosen in BACKENDS.items():
        if backend == "torch" or kernels.native_core() is not None:
            with chosen():
                found = {case.name: complaint(case, backend) for case in CASES if case.called == called}
            complaints |= {(backend, name): words for name, words in found.items() if words is not None}
    assert not complaints


def test_there_are_at_least_300_different_wrong_calls() -> None:
    tell(f"G: {len(CASES)} wrong calls, each on every backend")
    assert len({case.name for case in CASES}) == len(CASES) >= 300
