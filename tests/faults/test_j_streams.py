"""J: a buffer that was saved and loaded in a new process continues with the batches of the uninterrupted run."""

from __future__ import annotations

import hashlib
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

import relive as rl
from relive.storage.codec import tensor_bytes
from tests.checkpoint.traffic import KINDS
from tests.faults.processes import started
from tests.tiers import select
from tests.totals import SEED, tell, trials

BATCHES = 1_000


def lived(kind: str, seed: int, root: Path) -> Any:
    """Return a buffer after random operations, draws and saves; the last operation is a save."""
    rng, buffer = random.Random(seed), KINDS[kind].make()
    for n in range(rng.randrange(3, 90)):
        KINDS[kind].act(buffer, 1_000 * seed + n)
        if rng.random() < 0.3:
            KINDS[kind].read(buffer)
        if rng.random() < 0.05:
            buffer.save(root, keep=rng.randrange(1, 4))
    buffer.save(root)
    return buffer


def stream(kind: str, buffer: Any, seed: int, batches: int = BATCHES) -> str:
    """Return a hash of the next batches, with operations between them."""
    total, count, n = hashlib.sha256(), 0, 0
    while count < batches:
        found = KINDS[kind].read(buffer)
        for batch in found:
            total.update(b"".join(map(bytes, map(tensor_bytes, leaves(batch)))))
        count += len(found)
        if n % 4 == 0 or not found:
            KINDS[kind].act(buffer, 1_000 * seed + 500 + n)
        n += 1
    return total.hexdigest()


def leaves(batch: Any) -> list[Any]:
    return [leaf for name in sorted(batch) for leaf in leaves(batch[name])] if isinstance(batch, dict) else [batch]


def streams_of_loaded(kind: str, runs: list[tuple[int, Path, Any]]) -> list[str]:
    """Load each checkpoint and hash its next batches; runs in a new process."""
    found = []
    for seed, root, clock in runs:
        buffer: Any = rl.load(root)
        if clock is not None:
            buffer._tests_clock = clock
        found.append(stream(kind, buffer, seed))
    return found


def resume(path: Path, kind: str, scripts: int, seed: int) -> None:
    """Run scripts of one kind, twenty per process."""
    for first in range(0, scripts, 20):
        runs, buffers = [], {}
        for script in range(first, min(first + 20, scripts)):
            root = path / f"{script}"
            buffers[script] = buffer = lived(kind, seed + script, root)
            clock = getattr(buffer, "_tests_clock", None)
            runs.append((seed + script, root, None if clock is None else clock.copy()))
        answer = started(streams_of_loaded, kind, runs, timeout=3600)
        expected = {script: stream(kind, buffer, seed + script) for script, buffer in buffers.items()}
        for (script, stays), goes in zip(expected.items(), answer(), strict=True):
            assert goes == stays, f"{kind}, script of seed {seed + script}"
        for _, root, _ in runs:
            shutil.rmtree(root)
    tell(f"J1: {kind}, {scripts} scripts of {BATCHES} batches each in a new process, seeds from {seed}")


@pytest.mark.filterwarnings("ignore::relive.DataWarning")  # some scripts number observations across episode ends
@pytest.mark.promise("J1")
@pytest.mark.parametrize(
    ("kind", "scripts"), select(("prioritized", 6), of=[("prioritized", 6), *((kind, 20) for kind in KINDS)])
)
def test_a_new_process_continues_with_the_same_batches(kind: str, scripts: int, tmp_path: Path) -> None:
    resume(tmp_path, kind, trials("J1", scripts), SEED)


@pytest.mark.filterwarnings("ignore::relive.DataWarning")
@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_many_scripts_continue_with_the_same_batches(kind: str, tmp_path: Path) -> None:
    resume(tmp_path, kind, trials("J1_LONG", 1_000), SEED)
