"""What a buffer consists of, in the words of a checkpoint; and its parts that several kinds of buffers have."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from relive.errors import CheckpointError, IncompatibleCheckpoint, explain
from relive.fields.schema import Carry, Field, Path, Stacked, Tree
from relive.kernels.reader import bits_of
from relive.memory.documents import NAME, Array, Node
from relive.memory.saved import DTYPES, MOST_OF_RANDOM, Arrays, Saved, Source, nbytes_of
from relive.randomness import Randomness
from relive.replay.samplers import Counted, Prioritized, Sampler, Uniform, WithoutReplacement
from relive.statistics.episodes import EpisodeStats
from relive.statistics.norm import RunningNorm
from relive.statistics.observers import Listeners

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_DEVICE = re.compile(r"[a-z]{1,32}(:[0-9]{1,3})?")
_BLOCK = 1 << 22
"""Bytes that are copied at once where memory cannot be written as it lies."""


@dataclass
class Rows:
    """Rows that never change once they are written: columns `[slots, N, …]`, row r of an environment at r mod slots.

    In memory are the rows `first[e]` to `stop[e]` of each environment e.
    """

    columns: Arrays
    first: torch.Tensor
    stop: torch.Tensor

    @property
    def slots(self) -> int:
        """How many rows of an environment there is room for."""
        return len(next(iter(self.columns.values())))

    def since(self, saved: torch.Tensor) -> Rows:
        """The rows from `saved[e]` on."""
        return Rows(self.columns, torch.minimum(torch.maximum(self.first, saved), self.stop), self.stop)

    def __len__(self) -> int:
        return int((self.stop - self.first).sum())

    @property
    def nbytes(self) -> int:
        """Of all their columns together."""
        return sum(len(self) * column[0, 0].numel() * column.element_size() for column in self.columns.values())

    @property
    def arrays(self) -> tuple[Array, ...]:
        """What a segment of them has: which rows, and their columns."""
        envs, count = len(self.first), len(self)
        bounds = tuple(Array(name, "int64", (envs,)) for name in ("first", "stop"))
        return bounds + tuple(
            Array(name, _NAMES[column.dtype], (count, *column.shape[2:])) for name, column in self.columns.items()
        )

    def parts(self) -> Iterator[memoryview]:
        """Their bytes, without a copy where the rows of all environments lie in one piece."""
        yield bytes_of(self.first)
        yield bytes_of(self.stop)
        pieces = self.pieces()
        for column in self.columns.values():
            flat = bits_of(column.flatten(0, 1))
            for piece in pieces:
                yield bytes_of(flat[piece])

    def pieces(self) -> list[Any]:
        """Where the rows lie in columns `[slots · N, …]`, in the order of a segment: by time if all environments have
        the same rows, else by environment."""
        envs, slots = len(self.first), self.slots
        widest = max(column[0, 0].numel() * column.element_size() for column in self.columns.values())
        step = max(_BLOCK // max(widest, 1), 1)
        if self.is_even:
            first, stop = int(self.first[0]), int(self.stop[0])
            edges = sorted({first, stop, *range(first - first % slots + slots, stop, slots)})
            runs = [(a % slots * envs, (b - a) * envs) for a, b in pairwise(edges)]
            return [slice(at + i, at + min(i + step, size)) for at, size in runs for i in range(0, size, step)]
        return list(self.places(slots).split(step))

    @property
    def is_even(self) -> bool:
        """All environments have the same rows."""
        return bool((self.first == self.first[0]).all() and (self.stop == self.stop[0]).all())

    def numbers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The row and the environment of each, in the order of a segment."""
        envs = torch.arange(len(self.first))
        if self.is_even:
            rows = torch.arange(int(self.first[0]), int(self.stop[0]))
            return rows.repeat_interleave(len(envs)), envs.repeat(len(rows))
        sizes = self.stop - self.first
        env = envs.repeat_interleave(sizes)
        return torch.arange(len(env)) - (sizes.cumsum(0) - sizes - self.first)[env], env

    def places(self, slots: int) -> torch.Tensor:
        """Their flat slots in columns of `slots`."""
        row, env = self.numbers()
        return row % slots * len(self.first) + env


class Read(Saved):
    """What is known of a checkpoint when a buffer is put together again."""

    def __init__(self, config: Node, values: Node, arrays: Source) -> None:
        super().__init__(values, arrays)
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


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, its own memory where that is the host's and in one piece."""
    if sys.byteorder != "little":
        raise CheckpointError(
            explain("save", "a little-endian machine", sys.byteorder, "Save on a little-endian machine.")
        )
    whole = tensor.detach().cpu().contiguous()
    # An axis of length one may have any stride, which a view of bytes minds: say that memory is in one piece.
    flat = whole.as_strided((whole.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def array_of(name: str, tensor: torch.Tensor) -> Array:
    """How a file describes a tensor."""
    return Array(name, _NAMES[tensor.dtype], tuple(tensor.shape))


# Declarations


def describe(tree: Tree) -> Any:
    """A declaration as JSON: a leaf is a list, names are an object."""
    if isinstance(tree, dict):
        return {_checked(name): describe(child) for name, child in tree.items()}
    shape, dtype = list(tree.shape), _NAMES[tree.dtype]
    if isinstance(tree, Carry):
        return ["carry", shape, dtype, tree.every]
    if isinstance(tree, Stacked):
        return ["stacked", shape, dtype, tree.k, tree.axis, tree.pad]
    return ["field", shape, dtype]


def declared(node: Node) -> Tree:
    """The declaration that `describe` made JSON of."""
    if isinstance(node.value, dict):
        if not node.value:
            raise node.wrong("at least one field")
        return {name: declared(child) for name, child in node.entries().items()}
    parts = node.items(8)
    if not parts:
        raise node.wrong("a field")
    kind, *rest = parts
    sizes = {"field": 2, "carry": 3, "stacked": 5}
    if len(rest) != sizes[kind.one_of(sizes)]:
        raise node.wrong(f"{sizes[kind.value]} entries after {kind.value!r}")
    shape, dtype = rest[0].shape(), DTYPES[rest[1].one_of(DTYPES)]
    if any(size < 1 for size in shape):
        raise rest[0].wrong("positive sizes")
    if kind.value == "carry":
        return Carry(shape, dtype, every=rest[2].integer(1))
    if kind.value == "stacked":
        axis = rest[3].integer(0, len(shape))
        return Stacked(Field(shape, dtype), rest[2].integer(2, 1 << 16), axis, rest[4].one_of(("repeat", "zero")))
    return Field(shape, dtype)


def _checked(name: str) -> str:
    if not NAME.fullmatch(name):
        raise CheckpointError(explain("save", f"field names like {NAME.pattern}", repr(name), "Rename the field."))
    return name


def path_of(node: Node) -> Path:
    """A path to a leaf."""
    names = node.items(64)
    if not names:
        raise node.wrong("at least one name")
    return tuple(name.text() for name in names)


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


# Generators


def random_state(random: Randomness) -> tuple[dict[str, Any], Arrays]:
    """Where a stream of draws is."""
    bits, devices = random.snapshot()
    values = {
        "state": str(bits["state"]["state"]),
        "inc": str(bits["state"]["inc"]),
        "has_uint32": int(bits["has_uint32"]),
        "uinteger": int(bits["uinteger"]),
        "devices": [str(device) for device in devices],
    }
    return values, {f"device{i}": state for i, state in enumerate(devices.values())}


def restore_random(random: Randomness, saved: Saved, *, devices: bool) -> None:
    """Go on with a stream where it was; on other `devices` it starts anew."""
    node, arrays = saved.values, saved.tensors(MOST_OF_RANDOM)
    most = {"has_uint32": 1, "uinteger": 2**32 - 1}
    bits: Any = {name: node.entry(name).integer(0, largest) for name, largest in most.items()}
    bits |= {"bit_generator": "PCG64DXSM", "state": {name: _big(node.entry(name)) for name in ("state", "inc")}}
    names = node.entry("devices")
    states = {device_of(name): arrays.get(f"device{i}") for i, name in enumerate(names.items(64))} if devices else {}
    if any(state is None or device.type in ("cpu", "meta") for device, state in states.items()):
        raise names.wrong("accelerators, each with a generator state")
    try:
        random.restore((bits, states))  # pyright: ignore[reportArgumentType]
    except (RuntimeError, TypeError) as error:  # what a device says of bytes that are no state of its generator
        raise names.wrong(f"generator states ({error})") from None


def _big(node: Node) -> int:
    """A number of 128 bits, which JSON readers elsewhere would round."""
    if not isinstance(node.value, str) or not node.value.isascii() or not node.value.isdigit() or len(node.value) > 39:
        raise node.wrong("an integer of at most 128 bits, in decimal digits")
    number = int(node.value)
    if number >= 1 << 128:
        raise node.wrong("an integer of at most 128 bits, in decimal digits")
    return number


# Statistics and norms


def restore_listeners(listeners: Listeners, read: Read) -> None:
    """Go on counting where the saved ones were."""
    listeners.restore(read.part("listeners").tensors(nbytes_of(listeners.snapshot())))


def describe_listeners(listeners: Listeners) -> dict[str, Any]:
    """Who is told of every step, as JSON."""
    stats = listeners.stats
    described = None
    if stats is not None:
        described = {
            "window": stats.window,
            "metrics": list(stats.metrics),
            "reasons": list(stats.reasons),
        }
    norms = [
        [[path] if isinstance(path, str) else list(path), list(norm.shape), norm.eps, norm.clip]
        for path, norm in listeners.norm.items()
    ]
    return {"stats": described, "norm": norms}


def listeners_of(read: Read, num_envs: int | None) -> dict[str, Any]:
    """The statistics and norms as arguments of a buffer; each has its numbers in the state, or is not made."""
    node = read.config.entry("listeners")
    stats = node.entry("stats").optional()
    made = None
    if stats is not None:
        window = stats.entry("window").integer(1, 1 << 32)
        read.require("listeners.stats.ring", (window + 1,))
        read.require("listeners.stats.open", (None, num_envs or 1), only_lead=False)
        metrics, reasons = ([name.text() for name in stats.entry(key).items(1 << 10)] for key in ("metrics", "reasons"))
        made = EpisodeStats(num_envs, window, metrics, reasons)
    norms: dict[Path, RunningNorm] = {}
    for i, norm in enumerate(node.entry("norm").items(1 << 10)):
        path, shape, eps, clip = norm.parts(4)
        bound = clip.optional()
        read.require(f"listeners.norm{i}.mean", shape.shape())
        norms[path_of(path)] = RunningNorm(
            shape.shape(), eps=eps.number(), clip=None if bound is None else bound.number()
        )
    return {"stats": made, "norm": norms}
