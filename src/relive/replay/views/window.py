"""Every field at offsets of its own: observation histories, action chunks, LeRobot's delta timestamps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias

import torch

from relive.errors import SchemaError, explain
from relive.fields.conversion import bits_of
from relive.fields.schema import Field, Path, Schema, leaves_of
from relive.kernels.torch_ops import wide
from relive.randomness import Randomness
from relive.replay.offset_plan import Counted, OffsetGroup, OffsetPlan
from relive.replay.offset_reading import Reach, nearest, reach_of
from relive.replay.store import Leaves, ReplayStore
from relive.replay.views.n_step import NStep
from relive.replay.views.protocol import require_order
from relive.replay.views.transition import Transition

Offsets: TypeAlias = "Iterable[int] | Mapping[str, Offsets]"
"""Steps from the drawn row on, or such steps by the names inside a nested field."""
Seconds: TypeAlias = "Iterable[float] | Mapping[str, Seconds]"

_TRANSITION = Transition()
_PADS = ("repeat", "zero")
_MOST_OFFSETS = 2**16
_MOST_STEPS = 2**31 - 1
_TOLERANCE = 1e-4
"""Seconds that a time may be beside its frame, as in LeRobot."""


@dataclass(frozen=True, init=False, repr=False)
class Window:
    """Each named field at its own offsets [B, len(offsets), …], never across an episode's border.

    Offset 0 is the drawn row, −1 the step before it, 1 the step after it. "<field>_mask" [B, len(offsets)] says which
    of them are real: stored, and of the same episode. Where there is none, the nearest step is repeated, as LeRobot and
    diffusion policies do, or there are zeros. What is not named is as `view` gives it.

    Observations are those of the whole episode: an offset of `obs` may reach the final observation, which no step
    starts from. `next_obs` counts from the next observation that `view` gives, so that `obs=(-1, 0), next_obs=(-1, 0)`
    are the histories that a policy sees before and after.

    `Window(action=range(h), view=NStep(h, gamma))` are chunks for Q-learning: h actions, their discounted reward, its
    discount and the state after them, all shortened alike where an episode ends. (Li et al., Reinforcement Learning
    with Action Chunking, 2025.)

    Args:
        offsets: by field, the offsets in any order; of a nested field also by the names inside it:
            `obs={"camera": (0,), "state": (-1, 0)}`. Its masks are then `batch["obs_mask", "camera"]`, and so on.
        view: how to read what is not named: `Transition()` or `NStep(n, gamma)`.
        pad: what lies outside the episode: the nearest step ("repeat") or zeros ("zero").

    >>> Window(obs=(-1, 0), action=range(16))
    Window(obs=(-1, 0), action=range(0, 16))
    """

    offsets: tuple[tuple[Path, tuple[int, ...]], ...]
    view: Transition | NStep
    pad: Literal["repeat", "zero"]

    def __init__(
        self, *, view: Transition | NStep = _TRANSITION, pad: Literal["repeat", "zero"] = "repeat", **offsets: Offsets
    ) -> None:
        if not isinstance(view, Transition | NStep):
            got = f"the class {view.__name__}" if isinstance(view, type) else repr(view)
            remedy = "Pass one of them; for goals, Hindsight(…, view=Window(…))."
            raise SchemaError(explain("Window.view", "Transition() or NStep(n, gamma)", got, remedy))
        if pad not in _PADS:
            raise SchemaError(explain("Window.pad", '"repeat" or "zero"', repr(pad), "Pass one of them."))
        if not offsets:
            remedy = "Pass Transition() to read single steps."
            raise SchemaError(explain("Window", "offsets of at least one field", "no field", remedy))
        object.__setattr__(self, "offsets", tuple(_named(offsets, _steps)))
        object.__setattr__(self, "view", view)
        object.__setattr__(self, "pad", pad)

    @classmethod
    def from_seconds(
        cls, fps: float, *, view: Transition | NStep = _TRANSITION, pad: Literal["repeat", "zero"] = "repeat",
        **seconds: Seconds,
    ) -> Window:  # fmt: skip
        """A window whose offsets are times in seconds, as LeRobot's delta timestamps are.

        Args:
            fps: frames per second.
            seconds: by field, the times from the drawn row on; each is a whole number of frames.
            view: how to read what is not named.
            pad: what lies outside the episode.

        >>> Window.from_seconds(10, obs=[-0.1, 0], action=[0, 0.1, 0.2])
        Window(obs=(-1, 0), action=range(0, 3))
        """
        if isinstance(fps, bool) or not isinstance(fps, Real) or not 0 < fps < math.inf:
            remedy = "Pass the frames per second."
            raise SchemaError(explain("Window.from_seconds: fps", "a positive number", repr(fps), remedy))
        return cls(view=view, pad=pad, **_in_frames("Window.from_seconds", seconds, float(fps)))

    def __repr__(self) -> str:
        tree: dict[str, Any] = {}
        for path, steps in self.offsets:
            node = tree
            for name in path[:-1]:
                node = node.setdefault(name, {})
            whole = range(steps[0], steps[0] + len(steps))
            node[path[-1]] = whole if len(steps) > 2 and steps == tuple(whole) else steps
        more: dict[str, Any] = {} if self.view == _TRANSITION else {"view": self.view}
        more |= {} if self.pad == "repeat" else {"pad": self.pad}
        return f"Window({', '.join(f'{name}={value!r}' for name, value in (tree | more).items())})"

    def check(self, store: ReplayStore) -> None:
        """Refuse a buffer whose rows are in no order, and fields that it does not have."""
        require_order(store, self)
        plan_of(store.schema, self)

    def read(self, store: ReplayStore, slots: torch.Tensor, random: Randomness) -> Leaves:
        return store.windowed(slots, plan_of(store.schema, self))

    def windows(self, store: ReplayStore, slots: torch.Tensor) -> torch.Tensor:
        """The steps around each row that any offset may need: [B, L] flat slots, -1 where there is none."""
        self.check(store)
        plan = plan_of(store.schema, self)
        before, after = plan.reach(store.memory.ring.slots)
        reach, steps = reach_of(store, slots, plan), torch.arange(-before, after + 1, device=slots.device)
        inside = (steps >= -reach.preceding.unsqueeze(1)) & (steps <= reach.ahead.unsqueeze(1))
        return torch.where(inside, store.later(slots.unsqueeze(1), steps), -1)

    def reduce(self, store: ReplayStore, slots: torch.Tensor, windows: torch.Tensor, steps: Leaves) -> Leaves:
        """A batch from its steps [B, L, …]; a step may have been made an end since, and then is the last one."""
        plan = plan_of(store.schema, self)
        before, _ = plan.reach(store.memory.ring.slots)
        width, mask = max(plan.n, 1), windows >= 0
        terminated = (steps[("terminated",)] & mask)[:, before:].long()
        goes_on = mask[:, before:] & (terminated.cumsum(1) - terminated == 0)
        ahead = goes_on.sum(1) - 1
        reach = Reach(mask[:, :before].sum(1), ahead, ahead.clamp(max=plan.n - 1) if plan.n else None)
        around = {path: leaf[:, before : before + width] for path, leaf in steps.items()}
        batch = self.view.reduce(store, slots, windows[:, before : before + width], around)
        return batch | _named_steps(plan, reach, steps, before)


def _named_steps(plan: OffsetPlan, reach: Reach, steps: Leaves, before: int) -> Leaves:
    """The leaves at their offsets and their masks, out of steps [B, L, …] from `before` steps before the row on."""
    found, inside = nearest(plan, reach)
    sizes = [len(group.offsets) for group in plan.groups]
    rows = torch.arange(len(found), device=found.device).unsqueeze(1)
    batch: Leaves = {}
    masks: Leaves = {}
    for group, step, mask in zip(plan.groups, found.split(sizes, 1), inside.split(sizes, 1), strict=True):
        final = (step > reach.ahead.unsqueeze(1)).flatten()
        for path in (plan.schema.paths[i] for i in group.leaves):
            led_to = ("next_obs", *path[1:])
            at = torch.minimum(step, reach.ahead.unsqueeze(1)) + before
            leaf = bits_of(steps[path])[rows, at]
            if group.counted != Counted.STEPS:
                after, flat = bits_of(steps[led_to])[rows, at].flatten(0, 1), leaf.flatten(0, 1)
                leaf = torch.where(wide(final, flat), after, flat).unflatten(0, step.shape)
            if plan.zeros:
                flat = leaf.flatten(0, 1)
                leaf = flat.masked_fill(wide(~mask.flatten(), flat), 0).unflatten(0, step.shape)
            batch[led_to if group.is_next else path] = leaf.view(steps[path].dtype)
        masks[group.mask] = mask.contiguous()
    return batch | masks


# What a caller names


def _named(tree: Mapping[str, Any], read: Callable[[str, Any], Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield (path, offsets) for everything that is named."""
    for name, value in tree.items():
        where = (*path, name)
        if not isinstance(value, Mapping):
            yield where, read(_text(where), value)
        elif not value or not all(isinstance(key, str) for key in value):
            remedy = "Pass offsets by the names of the field."
            raise SchemaError(explain(_text(where), "offsets by name", repr(value), remedy))
        else:
            yield from _named(value, read, where)


def _text(path: Path) -> str:
    return "Window." + ".".join(path)


def _listed(where: str, values: Any, what: str) -> list[Any]:
    remedy = f"Pass a tuple or list of {what}, or a range."
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, str | bytes | set | frozenset) or not isinstance(values, Iterable):
        got = "a set, which has no order" if isinstance(values, set | frozenset) else repr(values)
        raise SchemaError(explain(where, f"several {what}", got, remedy))
    if isinstance(values, range) and len(values) > _MOST_OFFSETS:
        raise SchemaError(explain(where, f"at most {_MOST_OFFSETS} {what}", values, "Pass fewer."))
    found = list(values)
    if not found or len(found) > _MOST_OFFSETS:
        remedy = "Leave out a field without offsets."
        raise SchemaError(explain(where, f"1 to {_MOST_OFFSETS} {what}", len(found), remedy))
    return found


def _steps(where: str, values: Any) -> tuple[int, ...]:
    found = _listed(where, values, "offsets")
    for each in found:
        if isinstance(each, bool) or not isinstance(each, Integral) or abs(int(each)) > _MOST_STEPS:
            remedy = "Pass whole numbers of steps; Window.from_seconds(fps, …) takes times."
            raise SchemaError(explain(where, "offsets that are ints below 2^31", repr(each), remedy))
    return tuple(map(int, found))


def _in_frames(where: str, tree: Mapping[str, Any], fps: float) -> dict[str, Any]:
    """Times in seconds as frames, named as before."""
    return {
        name: _in_frames(f"{where}: {name}", value, fps)
        if isinstance(value, Mapping)
        else [_frame(f"{where}: {name}", each, fps) for each in _listed(f"{where}: {name}", value, "times")]
        for name, value in tree.items()
    }


def _frame(where: str, seconds: Any, fps: float) -> int:
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or not math.isfinite(seconds):
        raise SchemaError(explain(where, "times in seconds", repr(seconds), "Pass numbers."))
    frames = float(seconds) * fps
    if abs(frames - round(frames)) > _TOLERANCE * fps:
        remedy = f"Pass whole frames, for example {math.floor(frames) / fps:.6g} or {math.ceil(frames) / fps:.6g}."
        raise SchemaError(explain(where, f"times that are multiples of 1/{fps:g} s", repr(seconds), remedy))
    return round(frames)


# What a buffer has of it


@lru_cache(maxsize=128)
def plan_of(schema: Schema, window: Window) -> OffsetPlan:
    """Which leaves a window reads at which offsets; raises where a field is not there."""
    groups = tuple(_group(schema, path, offsets) for path, offsets in window.offsets)
    n_step = window.view if isinstance(window.view, NStep) else None
    n, gamma = (n_step.n, float(n_step.gamma)) if n_step is not None else (0, 0.0)
    return OffsetPlan(schema, groups, window.pad == "zero", n, gamma)


def _group(schema: Schema, path: Path, offsets: tuple[int, ...]) -> OffsetGroup:
    name = "obs" if path[0] == "next_obs" else path[0]
    schema.require(name)
    stored = (name, *path[1:])
    leaves = tuple(i for i in schema.leaf_indices[name] if schema.paths[i][: len(stored)] == stored)
    if not leaves:
        tree = schema.trees[name]
        inside = ", ".join(".".join(each[1:]) for each, _ in leaves_of((name,), tree)) or "no names inside"
        remedy = f"Pass {path[0]}=offsets." if isinstance(tree, Field) else "Name one of them."
        raise SchemaError(explain(_text(path), f"a part of {path[0]} ({inside})", ".".join(path[1:]), remedy))
    group = OffsetGroup(path, offsets, _COUNTED.get(path[0], Counted.STEPS), leaves)
    if group.mask[0] in schema.names:
        remedy = "Rename the field, or leave its window out."
        expected = f"the name {group.mask[0]} for the mask of {path[0]}"
        raise SchemaError(explain(_text(path), expected, "a declared field of this name", remedy))
    return group


_COUNTED = {"obs": Counted.OBSERVATIONS, "next_obs": Counted.NEXT_OBSERVATIONS}
