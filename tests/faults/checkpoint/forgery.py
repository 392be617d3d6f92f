"""Manifests that somebody else wrote: anything in them, and the checksum right."""

from __future__ import annotations

import copy
import json
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HOSTILE: list[Any] = [
    -1, 0, 1, 2**31, 2**32, 2**40, 2**53, 2**62, 2**63, 2**64, -(2**63), 10**30, 10**400, 1.5, -0.0, 1e308, True, False,
    None, "", "x", "..", "../../etc/passwd", "/etc/passwd", "a/b", "\x00", "é" * 40, "float32", "object", "cuda:0",
    "meta", "Uniform", "os.system", [], [[]], [0], [-1], [2**40, 2**40], [2**62] * 16, [1] * 99, {}, {"a": 1},
    {"__class__": "os"}, "00000001.bin", "00000001-0.bin", "00000009.bin", ["field", [2**40], "float32"],
    ["field", [-1], "float32"], ["carry", [2], "float32", 0], ["stacked", [2], "uint8", 2**15, 0, "repeat"],
]  # fmt: skip


def body(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def write(root: Path, number: int, data: bytes) -> None:
    """A manifest with a right checksum."""
    path = root / "manifests" / f"{number:08}.json"
    path.write_bytes(b"recollect 1 %08x\n" % zlib.crc32(data) + data)


def document_of(root: Path, number: int) -> Any:
    return json.loads((root / "manifests" / f"{number:08}.json").read_bytes().split(b"\n", 1)[1])


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document."""
    if path:
        yield path
    if isinstance(node, dict | list):
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from places(child, (*path, key))


def forged(document: Any, rng: random.Random) -> Any:
    """A document with some of its nodes replaced, removed, doubled or swapped."""
    document = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        path = rng.choice(list(places(document)))
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


def by_hand(document: Any) -> dict[str, bytes]:
    """Bodies that each are wrong in one way that we thought of."""
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
