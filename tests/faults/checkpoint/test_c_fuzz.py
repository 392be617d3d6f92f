"""C: randomly forged checkpoints, states, and commits and arrays of disk memory."""

from __future__ import annotations

import json
import random
import resource
import shutil
import time
import warnings
import zlib
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relive as rl
from tests.checkpoint.traffic import KINDS
from tests.faults.checkpoint.disk import save_old_checkpoint
from tests.faults.checkpoint.forgery import State, body, forge_document, forge_state_arrays, read_document, write
from tests.faults.checkpoint.test_c_files import CHECK, use_loaded_buffer
from tests.faults.processes import apart
from tests.totals import SEED, tell, trials

SAMPLERS = [rl.Uniform(), rl.Prioritized(), rl.WithoutReplacement(), rl.Counted(rl.Prioritized())]
_HOSTILE = [b"\x00" * 8, b"\xff" * 8, b"\x01" + b"\x00" * 7, b"\x00" * 7 + b"\x7f", b"\x00" * 6 + b"\xf0\x7f"]
"""0, −1, 1, a huge number and infinity, as eight bytes."""


def forge_manifest(root: Path, rng: random.Random) -> str:
    write(root, 2, body(forge_document(read_document(root, 2), rng)))
    return "a manifest"


def forge_state(root: Path, rng: random.Random) -> str:
    return forge_state_arrays(State(root, 2), rng)


def forge_folder(root: Path, rng: random.Random) -> str:
    """Copy a manifest, state or segment over another file, or delete it."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    source, target = rng.choice(files), rng.choice(files)
    shutil.copy(source, target) if source != target else target.unlink()
    return f"{source.name} as {target.name}"


def make_disk(root: Path, rng: random.Random) -> None:
    """Create disk memory with a history, closed or left open as after a kill."""
    replay = rl.ReplayBuffer(24, 2, 1, num_envs=3, sampler=rng.choice(SAMPLERS), seed=1, device=rl.Memory.disk(root))
    for t in range(rng.choice((0, 3, 12))):
        obs = np.full((3, 2), t)
        replay.add(obs, np.zeros((3, 1)), np.full(3, t), np.full(3, t % 4 == 3), np.zeros(3, bool), obs + 1)
    if rng.random() < 0.5:
        replay.close()


def forge_commit(root: Path, rng: random.Random) -> str:
    """Change the document or the arrays of the commits and correct their checksums."""
    for path in root.glob("commit?"):
        head, _, rest = path.read_bytes().partition(b"\n")[2].partition(b"\n")
        # The second commit of new memory has no contents yet.
        if not head:
            continue
        if rng.random() < 0.7:
            head = body(forge_document(json.loads(head), rng))
        elif rest:
            at = rng.randrange(len(rest))
            rest = rest[:at] + rng.choice(_HOSTILE) + rest[at + 8 :] if rng.random() < 0.8 else rest[:at]
        whole = head + b"\n" + rest
        path.write_bytes(b"recollect 1 %08x\n" % zlib.crc32(whole) + whole)
    return "commits"


def forge_array(root: Path, rng: random.Random) -> str:
    """Write a hostile number into a file of disk memory."""
    path = rng.choice(sorted(path for path in root.iterdir() if path.stat().st_size >= 8 and path.name != "FORMAT"))
    with path.open("r+b") as file:
        file.seek(8 * rng.randrange(path.stat().st_size // 8))
        file.write(rng.choice(_HOSTILE))
    return path.name


def forge_once(root: Path, rng: random.Random) -> tuple[str, str, str]:
    """Forge a folder and load it; return what was forged, the outcome, and a wrong error or ""."""
    if root.exists():
        shutil.rmtree(root)
    is_disk = rng.random() < 0.4
    kind = "disk" if is_disk else rng.choice(list(KINDS))
    if is_disk:
        make_disk(root, rng)
    else:
        save_old_checkpoint(kind, root)
    forges = (forge_commit, forge_array) if is_disk else (forge_manifest, forge_state, forge_folder)
    what = f"{kind}: {rng.choice(forges)(root, rng)}"
    try:
        buffer = rl.load(root, number=None if is_disk or rng.random() < 0.3 else 2)
    except (rl.CorruptCheckpoint, rl.IncompatibleCheckpoint, rl.NoCheckpoint) as error:
        return what, type(error).__name__, ""
    except BaseException as error:
        return what, "", f"load: {type(error).__name__}: {error}"
    try:
        lives_on(kind, buffer)
    except BaseException as error:
        return what, "", f"later: {type(error).__name__}: {error}"
    return what, "loaded", ""


def lives_on(kind: str, buffer: Any) -> None:
    if kind != "disk":
        # A forged manifest may declare other fields than this step has.
        with suppress(rl.SchemaError):
            use_loaded_buffer(kind, buffer)
        CHECK[type(buffer)](buffer)
        return
    try:
        buffer.check()
    except rl.InvariantError:
        # `check` reads all rows, and may be the first to detect forged ones.
        buffer.close()
        return
    obs = np.zeros((3, 2))
    # Forged heads may be near 2⁶³, fields declared differently, and resets pending.
    with suppress(OverflowError, rl.SchemaError, rl.NotReadyError, rl.PriorityError):
        for _ in range(3):
            buffer.add(obs, np.zeros((3, 1)), np.zeros(3), np.zeros(3, bool), np.zeros(3, bool), obs + 1)
        buffer.sample(3)
    buffer.check()
    buffer.close()


def forge_many(root: Path, seconds: float, seed: int) -> tuple[Counter[str], float, float, list[str]]:
    """Forge for some seconds; return counts of outcomes, the longest CPU time, growth in MiB, and wrong errors."""
    outcomes, slowest, wrong, rng = Counter[str](), 0.0, list[str](), random.Random(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(20):
            # The first load allocates memory that stays, such as that of imported modules.
            forge_once(root, rng)
        start, until = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic() + seconds
        while time.monotonic() < until and len(wrong) < 20:
            began = time.process_time()
            what, outcome, error = forge_once(root, rng)
            slowest = max(slowest, time.process_time() - began)
            outcomes[outcome] += 1
            if error:
                wrong.append(f"seed {seed}, trial {sum(outcomes.values())}: {what}: {error}"[:400])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) / 1024
    return outcomes, slowest, grown, wrong


def fuzz(root: Path, seconds: float, seed: int) -> None:
    outcomes, slowest, grown, wrong = apart(forge_many, root, seconds, seed, timeout=seconds + 600)
    count = sum(outcomes.values())
    tell(f"forged files: {count}, {dict(outcomes)}, {slowest:.2f} s and {grown:.0f} MiB at most, seed {seed}")
    assert not wrong, "\n".join(wrong)
    assert outcomes["CorruptCheckpoint"] > 0
    assert outcomes["loaded"] > 0
    assert slowest < 2
    assert grown < 128


@pytest.mark.thorough
def test_forged_files_are_typed_errors_or_buffers(tmp_path: Path) -> None:
    fuzz(tmp_path / "root", trials("FORGED", 8), SEED)


@pytest.mark.long
def test_an_hour_of_forged_files(tmp_path: Path) -> None:
    """Runs in slices of ten minutes; memory must stay flat within each."""
    whole = trials("FORGED_LONG", 3600)
    for i in range(-(-whole // 600)):
        fuzz(tmp_path / f"{i}", min(600, whole - 600 * i), SEED + i)
