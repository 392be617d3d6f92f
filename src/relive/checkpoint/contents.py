"""What a buffer consists of, in the words of a checkpoint; and its parts that several kinds of buffers have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from relive.errors import IncompatibleCheckpoint, explain
from relive.memory.documents import Node
from relive.memory.rows import Rows
from relive.memory.saved import Arrays
from relive.replay.samplers import Counted, Prioritized, Sampler, Uniform, WithoutReplacement


@dataclass
class Contents:
    """A buffer taken apart."""

    kind: str
    config: dict[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)
    rows: Rows | None = None

    def take(self, name: str, part: tuple[dict[str, Any], Arrays]) -> None:
        """Add a part under a name."""
        values, arrays = part
        self.values[name] = values
        self.arrays.update({f"{name}.{key}": array for key, array in arrays.items()})


# Samplers

_SAMPLERS: dict[str, type] = {kind.__name__: kind for kind in (Uniform, Prioritized, WithoutReplacement, Counted)}


def describe_sampler(sampler: Sampler) -> dict[str, Any] | None:
    """A sampler of ours as JSON; None for one that only its maker can make again."""
    name = type(sampler).__name__
    if _SAMPLERS.get(name) is not type(sampler):
        return None
    settings = dict(vars(sampler))
    if isinstance(sampler, Counted):
        settings["sampler"] = describe_sampler(sampler.sampler)
        return None if settings["sampler"] is None else {"name": name, **settings}
    return None if any(callable(value) for value in settings.values()) else {"name": name, **settings}


def sampler_of(node: Node, given: Sampler | None) -> Sampler:
    """The sampler that was saved, or the one that is given in its place."""
    if given is not None:
        return given
    if node.optional() is None:
        remedy = "Pass sampler= to load, equal to the sampler of the saved buffer."
        raise IncompatibleCheckpoint(
            explain("sampler", "a sampler of relive, which load can make", "a custom sampler", remedy)
        )
    kind = node.entry("name").one_of(_SAMPLERS)
    if kind == "Counted":
        return Counted(sampler_of(node.entry("sampler"), None))  # refuses another Counted
    if kind == "Uniform":
        return Uniform()
    if kind == "WithoutReplacement":
        return WithoutReplacement(node.entry("drop_last").flag())
    alpha, beta, eps = (node.entry(name).number() for name in ("alpha", "beta", "eps"))
    normalize: Any = node.entry("normalize").one_of(("batch", "global"))
    return Prioritized(alpha, beta, eps, normalize)
