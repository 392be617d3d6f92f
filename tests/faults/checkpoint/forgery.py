"""Forged manifests and arrays: arbitrary contents under a correct checksum."""

from __future__ import annotations

import copy
import json
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from relive.storage.codec import tensor_bytes

HOSTILE: list[Any] = [
    -1, 0, 1, 2**31, 2**32, 2**40, 2**53, 2**62, 2**63, 2**64, -(2**63), 10**30, 10**400, 1.5, -0.0, 1e308, True, False,
    None, "", "x", "..", "../../etc/passwd", "/etc/passwd", "a/b", "\x00", "é" * 40, "float32", "object", "cuda:0",
    "meta", "Uniform", "os.system", [], [[]], [0], [-1], [2**40, 2**40], [2**62] * 16, [1] * 99, {}, {"a": 1},
    {"__class__": "os"}, "00000001.bin", "00000001-0.bin", "00000009.bin", ["field", [2**40], "float32"],
    ["field", [-1], "float32"], ["carry", [2], "float32", 0], ["stacked", [2], "uint8", 2**15, 0, "repeat"],
]  # fmt: skip


def body(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def write(root: Path, number: int, data: bytes, *, version: int = 1) -> None:
    """Write a manifest with a correct checksum."""
    path = root / "manifests" / f"{number:08}.json"
    path.write_bytes(b"recollect %d %08x\n" % (version, zlib.crc32(data)) + data)


def read_document(root: Path, number: int) -> Any:
    return json.loads((root / "manifests" / f"{number:08}.json").read_bytes().split(b"\n", 1)[1])


def iter_nodes(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield every node of a document with its parent and key."""
    if path:
        yield path
    if isinstance(node, dict | list):
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from iter_nodes(child, (*path, key))


def forge_document(document: Any, rng: random.Random) -> Any:
    """Return a document in which some nodes are replaced, removed, doubled or swapped."""
    document = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        path = rng.choice(list(iter_nodes(document)))
        parent = document
        for key in path[:-1]:
            parent = parent[key]
        what = rng.random()
        if what < 0.75:
            parent[path[-1]] = copy.deepcopy(rng.choice(HOSTILE))
        elif what < 0.85:
            del parent[path[-1]]
        elif isinstance(parent, list):
            parent.insert(path[-1], copy.deepcopy(parent[path[-1]]))
        else:
            parent[rng.choice(("x", "obs", "../y", ""))] = parent[path[-1]]
    return document


def forge_by_hand(document: Any) -> dict[str, bytes]:
    """Manifest bodies with one hand-made mistake each, by name."""
    text = body(document).decode()
    deep = "[" * 100_000 + "]" * 100_000
    near = "[" * 900 + "]" * 900
    found = {
        "nothing": b"", "no JSON": b"recollect", "a list": b"[]", "null": b"null", "cut off": text[:-1].encode(),
        "more behind it": (text + "{}").encode(), "deep": deep.encode(), "deep objects": (b'{"a":' * 50_000),
        "deep inside": text.replace('"config":{', f'"config":{{"x":{deep},', 1).encode(),
        "nearly too deep": text.replace('"lineage":', f'"lineage":{near},"y":', 1).encode(),
        "a key twice": text.replace("{", '{"format":1,', 1).encode(),
        "NaN": text.replace('"number":', '"x":NaN,"number":', 1).encode(),
        "infinity": text.replace('"number":', '"x":-Infinity,"number":', 1).encode(),
        "1e999": text.replace('"number":', '"x":1e999,"number":', 1).encode(),
        "too many digits": text.replace('"format":1', '"format":' + "9" * 5000, 1).encode(),
        "no UTF-8": b"\xff" + text.encode(), "too long": text.encode() + b" " * (1 << 21),
        "many objects": text.replace('"kind":', '"kind":[' + "{}," * 600_000 + '{}],"x":', 1).encode(),
    }  # fmt: skip
    edits: dict[str, Any] = {
        "format": [0, -1, "1", 1.0, True, None, []], "number": [0, 3, -2, "2", 2.5, None],
        "lineage": ["", "x" * 32, 7, None, "A" * 32], "kind": ["", "../x", None, {}, "os"],
        "config": [None, [], 1, "x"], "values": [None, [], "x", 0], "state": [None, [], {}, "state"],
        "segments": [None, {}, [None], [[]], [{}], "x"],
    }  # fmt: skip
    for key, values in edits.items():
        for value in values:
            found[f"{key}={value!r}"] = body({**document, key: value})
        found[f"without {key}"] = body({k: v for k, v in document.items() if k != key})
    for name in ("../FORMAT", "/etc/passwd", "00000001.bin/../x.bin", "", ".", "..", "00000001.BIN", None, 3):
        found[f"state name {name!r}"] = body({**document, "state": {**document["state"], "name": name}})
    first = document["state"]["arrays"][0]
    for shape in ([-1], [2**62] * 4, [2**63], [1.5], ["1"], [True], None, {}, [0] * 17, [10**400]):
        arrays = [[first[0], first[1], shape], *document["state"]["arrays"][1:]]
        found[f"shape {str(shape)[:30]}"] = body({**document, "state": {**document["state"], "arrays": arrays}})
    for dtype in ("object", "float128", "O", "", None, 8, "torch.float32", "pickle"):
        arrays = [[first[0], dtype, first[2]], *document["state"]["arrays"][1:]]
        found[f"dtype {dtype!r}"] = body({**document, "state": {**document["state"], "arrays": arrays}})
    return found


HOSTILE_NUMBERS: list[float] = [-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 5, 255, 2**31, 2**53, 2**62, 2**63 - 1]
HOSTILE_FLOATS: list[float] = [float("nan"), float("inf"), float("-inf"), -1.0, -0.0, 0.0, 5e-324, 1e308, 1e-300, 3.0]


class State:
    """Arrays of a checkpoint's state and last segment, to modify and write with correct checksums."""

    def __init__(self, root: Path, number: int) -> None:
        self.root, self.number = root, number
        self.document = read_document(root, number)
        self._files = [("state", self.document["state"])]
        self._files += [("segments", segment) for segment in self.document["segments"][-1:]]
        self.arrays: dict[str, torch.Tensor] = {}
        for folder, file in self._files:
            data, at = (root / folder / file["name"]).read_bytes(), 0
            for name, dtype, shape in file["arrays"]:
                whole = torch.empty(shape, dtype=getattr(torch, dtype))
                size = whole.numel() * whole.element_size()
                if size:
                    whole.view(-1).view(torch.uint8).copy_(
                        torch.frombuffer(bytearray(data[at : at + size]), dtype=torch.uint8)
                    )
                self.arrays[name if folder == "state" else f"segment.{name}"] = whole
                at += size

    def write(self, arrays: dict[str, torch.Tensor] | None = None) -> None:
        """Write arrays of any shape and dtype (default: `self.arrays`) as the files of the checkpoint."""
        arrays = self.arrays if arrays is None else arrays
        document = copy.deepcopy(self.document)
        for folder, file in self._files:
            prefix = "" if folder == "state" else "segment."
            names = [name for name, *_ in file["arrays"] if prefix + name in arrays]
            chosen = [arrays[prefix + name] for name in names]
            data = b"".join(bytes(tensor_bytes(x)) for x in chosen)
            plain = [
                [name, str(x.dtype).removeprefix("torch."), list(x.shape)]
                for name, x in zip(names, chosen, strict=True)
            ]
            changed = {"name": file["name"], "arrays": plain, "checksums": [zlib.crc32(data)] if data else []}
            (self.root / folder / file["name"]).write_bytes(data)
            if folder == "state":
                document["state"] = changed
            else:
                document["segments"][-1] = changed
        write(self.root, self.number, body(document))


def forge_state_arrays(state: State, rng: random.Random) -> str:
    """Write the state with some arrays changed; return a description of the changes."""
    arrays = {name: x.clone() for name, x in state.arrays.items()}
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        name = rng.choice([name for name, x in arrays.items() if x.numel()])
        how = rng.choice((_one, _one, _one, _all, _shuffled, _shifted, _reshaped, _recast, None))
        if how is None:
            del arrays[name]
        else:
            arrays[name] = how(arrays[name], rng)
        done.append(f"{'removed' if how is None else how.__name__.strip('_')} {name}")
    state.write(arrays)
    return ", ".join(done)


def _hostile(x: torch.Tensor, rng: random.Random) -> torch.Tensor:
    if x.dtype == torch.bool:
        return torch.tensor(rng.choice((0, 1, 1, 2, 255)), dtype=torch.uint8).view(torch.bool)
    if x.dtype.is_floating_point:
        return torch.tensor(rng.choice(HOSTILE_FLOATS)).to(x.dtype)
    return torch.tensor(rng.choice(HOSTILE_NUMBERS)).to(x.dtype)


def _one(x: torch.Tensor, rng: random.Random) -> torch.Tensor:
    x.view(-1)[rng.randrange(x.numel())] = _hostile(x, rng)
    return x


def _all(x: torch.Tensor, rng: random.Random) -> torch.Tensor:
    return _hostile(x, rng).expand(x.shape).clone()


def _shuffled(x: torch.Tensor, rng: random.Random) -> torch.Tensor:
    order = list(range(x.numel()))
    rng.shuffle(order)
    return x.view(-1)[order].view(x.shape)


def _shifted(x: torch.Tensor, rng: random.Random) -> torch.Tensor:
    return x.view(-1).roll(rng.choice((1, -1, 3))).view(x.shape)


def _reshaped(x: torch.Tensor, rng: random.Random) -> torch.Tensor:
    flat = x.reshape(-1)
    return rng.choice((flat[:-1], flat[:0], flat, x[None], torch.cat([flat, flat]), flat[0], x.reshape(-1, 1)))


def _recast(x: torch.Tensor, rng: random.Random) -> torch.Tensor:
    return x.to(rng.choice((torch.int64, torch.float32, torch.uint8, torch.float64, torch.int32)))
