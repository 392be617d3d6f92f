"""Windows: fields at several offsets, such as observation histories, action chunks and delta timestamps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias

from relive.errors import SchemaError, explain
from relive.replay.read_plan import ReadAnchor, ReadGroup, ReadLayout, ReadPlan, make_row_plan
from relive.replay.views.view import DEFAULT_VIEW, NStep, Transition
from relive.schema.fields import Field, Path, Schema, iter_leaves

Offsets: TypeAlias = "Iterable[int] | Mapping[str, Offsets]"
"""Offsets in steps from the drawn row, or a mapping of offsets for a nested field."""
Seconds: TypeAlias = "Iterable[float] | Mapping[str, Seconds]"

_PAD_MODES = ("repeat", "zero")
_MAX_OFFSETS = 2**16
_MAX_STEPS = 2**31 - 1
_TOLERANCE_SECONDS = 1e-4
"""Maximum distance in seconds between a time and its frame, as in LeRobot."""


@dataclass(frozen=True, init=False, repr=False)
class Window:
    """Each named field at its own offsets [B, len(offsets), …], never across an episode's border.

    Offset 0 is the drawn row, −1 the step before it, 1 the step after it. "<field>_mask" [B, len(offsets)] marks the
    real steps: stored, and in the same episode. The other steps are repeated from the nearest real one, as in LeRobot
    and diffusion policies, or are zero. All other fields are read by `view`.

    An offset of `obs` may reach the final observation of an episode, after its last step. Offsets of `next_obs` count
    from the next observation of `view`: `obs=(-1, 0), next_obs=(-1, 0)` are the histories that a policy sees before and
    after the step.

    `Window(action=range(h), view=NStep(h, gamma))` reads chunks for Q-learning: h actions, their discounted reward, the
    discount and the state after them, all shortened at the end of an episode. (Li et al., Reinforcement Learning with
    Action Chunking, 2025.)

    Args:
        offsets: offsets by field, in any order; for a nested field also a mapping of its names:
            `obs={"camera": (0,), "state": (-1, 0)}`. Its masks are then `batch["obs_mask", "camera"]`, and so on.
        view: reads the other fields: `Transition()` or `NStep(n, gamma)`.
        pad: values outside the episode: the nearest step ("repeat") or zeros ("zero").

    >>> Window(obs=(-1, 0), action=range(16))
    Window(obs=(-1, 0), action=range(0, 16))
    """

    offsets: tuple[tuple[Path, tuple[int, ...]], ...]
    view: Transition | NStep
    pad: Literal["repeat", "zero"]

    def __init__(
        self, *, view: Transition | NStep = DEFAULT_VIEW, pad: Literal["repeat", "zero"] = "repeat", **offsets: Offsets
    ) -> None:
        if not isinstance(view, Transition | NStep):
            got = f"the class {view.__name__}" if isinstance(view, type) else repr(view)
            remedy = "Pass one of them; for goals, Hindsight(…, view=Window(…))."
            raise SchemaError(explain("Window.view", "Transition() or NStep(n, gamma)", got, remedy))
        if pad not in _PAD_MODES:
            raise SchemaError(explain("Window.pad", '"repeat" or "zero"', repr(pad), "Pass one of them."))
        if not offsets:
            remedy = "Pass Transition() to read single steps."
            raise SchemaError(explain("Window", "offsets of at least one field", "no field", remedy))
        object.__setattr__(self, "offsets", tuple(_flatten_offsets(offsets)))
        object.__setattr__(self, "view", view)
        object.__setattr__(self, "pad", pad)

    @classmethod
    def from_seconds(
        cls, fps: float, *, view: Transition | NStep = DEFAULT_VIEW, pad: Literal["repeat", "zero"] = "repeat",
        **seconds: Seconds,
    ) -> Window:  # fmt: skip
        """Make a window from offsets in seconds, such as LeRobot's delta timestamps.

        Args:
            fps: frames per second.
            seconds: times relative to the drawn row, by field; each is a whole number of frames.
            view: reads the other fields.
            pad: values outside the episode.

        >>> Window.from_seconds(10, obs=[-0.1, 0], action=[0, 0.1, 0.2])
        Window(obs=(-1, 0), action=range(0, 3))
        """
        if isinstance(fps, bool) or not isinstance(fps, Real) or not 0 < fps < math.inf:
            remedy = "Pass the frames per second."
            raise SchemaError(explain("Window.from_seconds: fps", "a positive number", repr(fps), remedy))
        return cls(view=view, pad=pad, **_convert_to_frames("Window.from_seconds", seconds, float(fps)))

    def __repr__(self) -> str:
        tree: dict[str, Any] = {}
        for path, steps in self.offsets:
            node = tree
            for name in path[:-1]:
                node = node.setdefault(name, {})
            full_range = range(steps[0], steps[0] + len(steps))
            node[path[-1]] = full_range if len(steps) > 2 and steps == tuple(full_range) else steps
        other_arguments: dict[str, Any] = {} if self.view == DEFAULT_VIEW else {"view": self.view}
        other_arguments |= {} if self.pad == "repeat" else {"pad": self.pad}
        return f"Window({', '.join(f'{name}={value!r}' for name, value in (tree | other_arguments).items())})"

    def plan(self, schema: Schema) -> ReadPlan:
        windows: dict[Path, ReadGroup] = {}
        for path, offsets in self.offsets:
            group = ReadGroup(
                ReadAnchor.NEXT if path[0] == "next_obs" else ReadAnchor.ROW, offsets, (f"{path[0]}_mask", *path[1:]),
                counts_observations=path[0] in ("obs", "next_obs"),
            )  # fmt: skip
            windows |= dict.fromkeys(_select_leaves(schema, path, group), group)
        n, gamma = (self.view.n, float(self.view.gamma)) if isinstance(self.view, NStep) else (0, 0.0)
        return make_row_plan(schema, n, gamma, windows, ReadLayout.ZEROS if self.pad == "zero" else ReadLayout.NEAREST)


def _flatten_offsets(tree: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, tuple[int, ...]]]:
    """Yield (path, offsets) for every leaf of nested mappings."""
    for name, value in tree.items():
        where = (*path, name)
        if not isinstance(value, Mapping):
            yield where, _parse_steps(_argument_name(where), value)
        elif not value or not all(isinstance(key, str) for key in value):
            remedy = "Pass offsets by the names of the field."
            raise SchemaError(explain(_argument_name(where), "offsets by name", repr(value), remedy))
        else:
            yield from _flatten_offsets(value, where)


def _argument_name(path: Path) -> str:
    return "Window." + ".".join(path)


def _as_list(where: str, values: Any, noun: str) -> list[Any]:
    remedy = f"Pass a tuple or list of {noun}, or a range."
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, str | bytes | set | frozenset) or not isinstance(values, Iterable):
        got = "a set, which has no order" if isinstance(values, set | frozenset) else repr(values)
        raise SchemaError(explain(where, f"several {noun}", got, remedy))
    if isinstance(values, range) and len(values) > _MAX_OFFSETS:
        raise SchemaError(explain(where, f"at most {_MAX_OFFSETS} {noun}", values, "Pass fewer."))
    items = list(values)
    if not items or len(items) > _MAX_OFFSETS:
        remedy = "Leave out a field without offsets."
        raise SchemaError(explain(where, f"1 to {_MAX_OFFSETS} {noun}", len(items), remedy))
    return items


def _parse_steps(where: str, values: Any) -> tuple[int, ...]:
    offsets = _as_list(where, values, "offsets")
    for each in offsets:
        if isinstance(each, bool) or not isinstance(each, Integral) or abs(int(each)) > _MAX_STEPS:
            remedy = "Pass whole numbers of steps; Window.from_seconds(fps, …) takes times."
            raise SchemaError(explain(where, "offsets that are ints below 2^31", repr(each), remedy))
    return tuple(map(int, offsets))


def _convert_to_frames(where: str, tree: Mapping[str, Any], fps: float) -> dict[str, Any]:
    """Convert nested times in seconds to frames."""
    return {
        name: _convert_to_frames(f"{where}: {name}", value, fps)
        if isinstance(value, Mapping)
        else [_convert_to_frame(f"{where}: {name}", each, fps) for each in _as_list(f"{where}: {name}", value, "times")]
        for name, value in tree.items()
    }


def _convert_to_frame(where: str, seconds: Any, fps: float) -> int:
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or not math.isfinite(seconds):
        raise SchemaError(explain(where, "times in seconds", repr(seconds), "Pass numbers."))
    frames = float(seconds) * fps
    if abs(frames - round(frames)) > _TOLERANCE_SECONDS * fps:
        remedy = f"Pass whole frames, for example {math.floor(frames) / fps:.6g} or {math.ceil(frames) / fps:.6g}."
        raise SchemaError(explain(where, f"times that are multiples of 1/{fps:g} s", repr(seconds), remedy))
    return round(frames)


def _select_leaves(schema: Schema, path: Path, group: ReadGroup) -> list[Path]:
    """Return the paths in the batch of all leaves below `path`; raises if there is no such field."""
    name = "obs" if path[0] == "next_obs" else path[0]
    schema.check_declared(name)
    stored_path = (name, *path[1:])
    leaves = [leaf for leaf, _ in iter_leaves((name,), schema.trees[name]) if leaf[: len(stored_path)] == stored_path]
    if not leaves:
        tree = schema.trees[name]
        inside = ", ".join(".".join(each[1:]) for each, _ in iter_leaves((name,), tree)) or "no names inside"
        remedy = f"Pass {path[0]}=offsets." if isinstance(tree, Field) else "Name one of them."
        raise SchemaError(explain(_argument_name(path), f"a part of {path[0]} ({inside})", ".".join(path[1:]), remedy))
    if group.mask is not None and group.mask[0] in schema.names:
        remedy = "Rename the field, or leave its window out."
        expected = f"the name {group.mask[0]} for the mask of {path[0]}"
        raise SchemaError(explain(_argument_name(path), expected, "a declared field of this name", remedy))
    return [(path[0], *leaf[1:]) for leaf in leaves]
