"""What a buffer consists of, in the words of a checkpoint; and its parts that several kinds of buffers have."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch

from relive.errors import IncompatibleCheckpoint, explain
from relive.memory.documents import Node
from relive.memory.rows import Rows
from relive.memory.saved import DTYPES, Arrays, Saved, Source
from relive.replay.samplers import Counted, Prioritized, Sampler, Uniform, WithoutReplacement

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_DEVICE = re.compile(r"[a-z]{1,32}(:[0-9]{1,3})?")


class Read(Saved):
    """What is known of a checkpoint when a buffer is put together again."""

    def __init__(self, config: Node, values: Node, arrays: Source, *, is_moved: bool = False) -> None:
        super().__init__(values, arrays, is_moved=is_moved)
        self.config = config


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


def device_of(node: Node) -> torch.device:
    """The device that was saved from, if this machine has it."""
    if node.text(_DEVICE).startswith("meta"):
        raise node.wrong("a device that holds data")
    return here(node.value)


def here(name: str | torch.device) -> torch.device:
    """A device, if this machine has it."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        got = str(error).partition("\n")[0]
        raise IncompatibleCheckpoint(
            explain(f"device {name}", "a device of this machine", got, "Pass device=.")
        ) from None


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
