"""Samplers as files name them. Whatever `relive.replay.samplers` exports can be saved and made again."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from relive.checkpoint.snapshot import SnapshotReader, nbytes_of
from relive.errors import IncompatibleCheckpoint, explain
from relive.replay import samplers
from relive.replay.row_memory import RowMemory
from relive.replay.samplers.protocol import Draws, Sampler
from relive.storage.codec import Node

_MOST_OF_SLOT = 64
"""Bytes that a sampler saves of a slot."""


def kinds() -> dict[str, type]:
    """The samplers that are exported, by name."""
    exported = {name: getattr(samplers, name) for name in samplers.__all__}
    return {name: kind for name, kind in exported.items() if isinstance(kind, type) and is_dataclass(kind)}


def config_of(sampler: Sampler) -> dict[str, Any] | None:
    """A sampler as JSON: its name and its settings. None for one that only its maker can make again."""
    name = type(sampler).__name__
    if kinds().get(name) is not type(sampler):
        return None
    settings: dict[str, Any] = {"name": name}
    for key, value in vars(sampler).items():
        setting = config_of(value) if hasattr(value, "start") else value
        if callable(setting) or (setting is None and value is not None):
            return None
        settings[key] = setting
    return settings


def sampler_of(node: Node, given: Sampler | None = None) -> Sampler:
    """The sampler that was saved, or the one that is given in its place."""
    if given is not None:
        return given
    if node.optional() is None:
        remedy = "Pass sampler= to load, equal to the sampler of the saved buffer."
        raise IncompatibleCheckpoint(
            explain("sampler", "a sampler of relive, which load can make", "a custom sampler", remedy)
        )
    kind: Any = kinds()[node.entry("name").one_of(kinds())]
    return kind(**{each.name: _setting(node.entry(each.name), each) for each in fields(kind)})


def _setting(node: Node, declared: Field[Any]) -> Any:
    """A setting of the type that its default has; a sampler's own constructor verifies the rest."""
    default = declared.default_factory() if declared.default_factory is not MISSING else declared.default
    if isinstance(node.value, dict):
        return sampler_of(node)
    if isinstance(default, bool):
        return node.flag()
    if isinstance(default, float):
        return node.number()
    if default is not MISSING and type(node.value) is not type(default):
        raise node.error(f"a value like {default!r}")
    return node.value


def resume(run: Draws, sampler: Sampler, memory: RowMemory, saved: SnapshotReader) -> None:
    """Go on with the draws of a saved run."""
    expected, slots = run.state(), memory.ring.kind.numel()
    found = saved.tensors(max(nbytes_of(expected), _MOST_OF_SLOT * slots) + (1 << 20))
    forms = [{name: (array.dtype, array.ndim) for name, array in arrays.items()} for arrays in (found, expected)]
    if forms[0] != forms[1]:
        remedy = "Pass sampler= to load, equal to the sampler of the saved buffer."
        raise IncompatibleCheckpoint(explain("sampler", f"the state of {sampler}", sorted(found), remedy))
    try:
        run.load_state(found)
    except ValueError as error:
        raise Node("state: sampler", str(error)).error("the state of a sampler") from None
