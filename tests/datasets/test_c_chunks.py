"""C12: forged and truncated chunks of every codec are decoded or refused; no byte outside them is read."""

from __future__ import annotations

import os
import random
import struct
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relive as rl
from relive.datasets import zarr
from tests.datasets.guarded import GuardedMemory, perturb
from tests.faults.processes import apart
from tests.totals import SEED, tell, trials

numcodecs = pytest.importorskip("numcodecs", reason='needs zarr: pip install ".[zarr]"')

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect and mallopt")

BLOSC = [(compressor, shuffle) for compressor in ("blosclz", "lz4", "lz4hc", "zlib", "zstd") for shuffle in (0, 1, 2)]
KINDS: dict[str, tuple[str | None, Any]] = {
    "raw": (None, None),
    "zlib": ("zlib", {"id": "zlib"}),
    "gzip": ("gzip", {"id": "gzip"}),
    "zstd": ("zstd", {"id": "zstd"}),
    "lz4": ("lz4", {"id": "lz4"}),
    **{
        f"blosc {compressor} {shuffle}": (
            "blosc",
            {"id": "blosc", "cname": compressor, "shuffle": shuffle, "blocksize": 512},
        )
        for compressor, shuffle in BLOSC
    },
}
"""For each codec, its name in zarr and its numcodecs settings."""


def encode_chunk(settings: Any, values: np.ndarray) -> bytes:
    return values.tobytes() if settings is None else bytes(numcodecs.get_codec(settings).encode(values))


def forge_chunk(rng: random.Random, kind: str | None, body: bytes) -> bytes:
    """Return a chunk with some bytes changed, cut off or appended."""
    actual = bytearray(body)
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(min(len(actual), rng.choice([16, 48, len(actual)])) or 1)
        way = rng.randrange(6)
        if way == 0:
            del actual[at:]
        elif way == 1:
            actual += rng.randbytes(rng.choice([1, 4, 100]))
        elif way == 2:
            numbers = [0, 1, 15, 16, 127, len(body), len(body) + 1, 2**31 - 1, 2**32 - 1, rng.randrange(2**16)]
            actual[at - at % 4 : at - at % 4 + 4] = struct.pack("<I", rng.choice(numbers))
        elif way == 3:
            actual[at : at + 1] = bytes([rng.choice([0, 1, 2, 3, 4, 7, 16, 17, 255, rng.randrange(256)])])
        elif way == 4:
            actual[at : at + 4] = rng.randbytes(4)
        elif actual:
            actual[at % len(actual)] ^= 1 << rng.randrange(8)
    # Most forged chunks of blosc have a valid version and valid lengths, so that later checks are reached too.
    if kind == "blosc" and len(actual) >= 16 and rng.random() < 0.8:
        actual[0] = 2
        actual[4:8] = body[4:8]
        actual[12:16] = struct.pack("<I", len(actual))
    return bytes(actual)


def make_chunk(rng: random.Random, settings: Any) -> tuple[bytes, int]:
    """Return the chunk of a random array, and its decoded size in bytes."""
    dtype = rng.choice([np.uint8, np.float32, np.float64, np.complex128, "S3", "S7"])
    count = rng.choice([1, 33, 300, 2000])
    values = np.resize(np.arange(rng.choice([1, 50, 1000])), count).astype(np.uint8).repeat(np.dtype(dtype).itemsize)
    values = values.view(dtype)
    return encode_chunk(settings, values), values.nbytes


def read_forged(name: str, count: int, seed: int, log: str) -> Counter[str]:
    """Decode forged chunks; return the number of chunks that were read and refused.

    Reading past the end of a chunk, or returning uninitialised memory, ends this process.
    """
    kind, settings = KINDS[name]
    guarded, outcomes = GuardedMemory(1 << 16), Counter[str]()
    trace = os.open(log, os.O_RDWR | os.O_CREAT)
    for trial in range(count):
        os.pwrite(trace, f"{name}, seed {seed}, trial {trial:08}".encode(), 0)
        rng = random.Random(f"{name} {seed} {trial}")
        body, nbytes = make_chunk(rng, settings)
        forgery = guarded.place(forge_chunk(rng, kind, body))
        results = []
        for byte in (0x55, 0xAA):
            perturb(byte)
            try:
                results.append(bytes(zarr.decode_chunk("chunk", kind, forgery, nbytes)))
            except rl.SchemaError:
                results.append(None)
        perturb(0)
        assert results[0] == results[1], f"{name}, trial {trial}: the result has bytes of uninitialised memory"
        assert results[0] is None or len(results[0]) == nbytes
        outcomes["refused" if results[0] is None else "read"] += 1
    return outcomes


def read_kinds(count: int, seed: int, log: str) -> dict[str, Counter[str]]:
    return {name: read_forged(name, count, seed, log) for name in KINDS}


def read_all(count: int, seed: int, folder: Path) -> None:
    try:
        outcomes = apart(read_kinds, count, seed, str(folder / "log"), timeout=3600)
    except AssertionError as error:
        raise AssertionError(f"{(folder / 'log').read_text()}: {error}") from error
    for name, actual in outcomes.items():
        tell(f"C12: {name}: {dict(actual)}, seed {seed}")
        assert actual["refused"]


@pytest.mark.parametrize("name", KINDS)
def test_chunks_of_every_codec_are_decoded(name: str) -> None:
    kind, settings = KINDS[name]
    for trial in range(20):
        rng = random.Random(trial)
        body, nbytes = make_chunk(rng, settings)
        expected = body if settings is None else bytes(numcodecs.get_codec(settings).decode(body))
        assert bytes(zarr.decode_chunk("chunk", kind, body, nbytes)) == expected


@pytest.mark.promise("C12")
def test_forged_chunks_are_read_or_refused(tmp_path: Path) -> None:
    read_all(trials("C12", 500), SEED, tmp_path)


@pytest.mark.long
def test_many_forged_chunks_are_read_or_refused(tmp_path: Path) -> None:
    read_all(trials("C12_LONG", 100_000) // len(KINDS), SEED, tmp_path)


def read_without_header_check(name: str, count: int, log: str) -> Counter[str]:
    """Run `read_forged` without the check of blosc headers."""
    zarr._require_valid_blosc = lambda body: None
    return read_forged(name, count, 0, log)


@pytest.mark.thorough
def test_a_reader_without_header_checks_fails(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ended with -|uninitialised memory"):
        apart(read_without_header_check, "blosc zstd 1", 500, str(tmp_path / "log"))


@pytest.mark.parametrize("length", [0, 3, 15, 16, 100])
@pytest.mark.parametrize("name", ["zlib", "gzip", "zstd", "lz4", "blosc lz4 1", "raw"])
def test_a_cut_chunk_is_refused(name: str, length: int) -> None:
    kind, settings = KINDS[name]
    body = encode_chunk(settings, np.random.default_rng(0).normal(size=100))
    with pytest.raises(rl.SchemaError, match="chunk: expected "):
        zarr.decode_chunk("chunk", kind, body[:length], 800)
