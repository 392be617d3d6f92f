"""C: files that are not what was saved: damaged, forged, planted, or made for something else."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import resource
import shutil
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import recollect as rc
from recollect.checkpoint import check
from tests.checkpoint.traffic import KINDS, digest, equal
from tests.faults.checkpoint.disk import SEED, old_checkpoint, trials
from tests.faults.checkpoint.forgery import body as body_of
from tests.faults.checkpoint.forgery import by_hand, document_of, forged, write

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.faults.checkpoint.test_c_files"])


def checked_files(root: Path, number: int = 2) -> list[Path]:
    """The files that the checkpoint consists of."""
    document = document_of(root, number)
    segments = [root / "segments" / segment["name"] for segment in document["segments"]]
    manifest = root / "manifests" / f"{number:08}.json"
    return [root / "FORMAT", manifest, root / "state" / document["state"]["name"], *segments]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_another_length_is_named(kind: str, tmp_path: Path) -> None:
    old_checkpoint(kind, tmp_path)
    rng, count = random.Random(SEED), 0
    for path in checked_files(tmp_path):
        data = path.read_bytes()
        for trial in range(trials("C1", 200)):
            cut = rng.randrange(len(data))
            path.write_bytes(data[:cut] if trial % 2 else data + rng.randbytes(rng.choice((1, 2, 8, 4096))))
            with pytest.raises(rc.CheckpointError) as caught:
                rc.load(tmp_path, number=2)
            assert path.name in str(caught.value), f"seed {SEED}"
            assert isinstance(caught.value, rc.CorruptCheckpoint | rc.IncompatibleCheckpoint)
            count += 1
        path.write_bytes(data)
    print(f"C1: {kind}, {count} lengths, seed {SEED}")  # noqa: T201


def flip_bits(path: Path, count: int, seed: int) -> None:
    rng, found = random.Random(seed), Counter[str]()
    for kind in KINDS:
        root = path / kind
        old_checkpoint(kind, root)
        files = checked_files(root)
        for trial in range(-(-count // len(KINDS))):
            file = files[trial % len(files)]
            data = file.read_bytes()
            bit = rng.randrange(8 * len(data))
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            file.write_bytes(damaged)
            with pytest.raises((rc.CorruptCheckpoint, rc.IncompatibleCheckpoint)) as caught:
                rc.load(root, number=2)
            assert file.name in str(caught.value), f"seed {seed}: bit {bit} of {file}"
            found[type(caught.value).__name__] += 1
            file.write_bytes(data)
    print(f"C2: {dict(found)}, seed {seed}")  # noqa: T201


def test_every_flipped_bit_is_seen(tmp_path: Path) -> None:
    flip_bits(tmp_path, trials("C2", 2_000), SEED)


@pytest.mark.long
def test_every_one_of_many_flipped_bits_is_seen(tmp_path: Path) -> None:
    flip_bits(tmp_path, trials("C2_LONG", 50_000), SEED)


def test_what_lies_in_lock_and_tmp_does_not_matter(tmp_path: Path) -> None:
    old = old_checkpoint("prioritized", tmp_path)
    (tmp_path / "LOCK").write_bytes(b"anything")
    (tmp_path / "tmp" / "rest").write_bytes(b"half a segment")
    assert equal(digest(rc.load(tmp_path)), old)
    (tmp_path / "LOCK").unlink()
    assert equal(digest(rc.load(tmp_path)), old)


# Forged manifests, read in a process of their own, whose memory is measured


def read_forged(root: Path, bodies: list[bytes] | int, seed: int, answer: Any) -> None:
    """Load each; tell what came of it, the longest time, the most memory, and what should not have been."""
    outcomes, slowest, wrong = Counter[str](), 0.0, list[str]()
    rng, document = random.Random(seed), document_of(root, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rc.load(root, number=2)
        start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for i in range(bodies if isinstance(bodies, int) else len(bodies)):
            write(root, 2, body_of(forged(document, rng)) if isinstance(bodies, int) else bodies[i])
            began = time.perf_counter()
            try:
                rc.load(root, number=2)
                outcomes["loaded"] += 1
            except (rc.CorruptCheckpoint, rc.IncompatibleCheckpoint) as error:
                outcomes[type(error).__name__] += 1
            except BaseException as error:
                wrong.append(f"{i}: {type(error).__name__}: {error}"[:300])
            slowest = max(slowest, time.perf_counter() - began)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) / 1024
    answer.put((outcomes, slowest, grown, wrong))


def in_a_process(*arguments: Any) -> Any:
    answer = _processes.Queue()
    process: Any = _processes.Process(target=read_forged, args=(*arguments, answer))
    process.start()
    found = answer.get(timeout=3600)
    process.join()
    return found


@pytest.mark.parametrize("kind", ["prioritized", "rollout", "distillation"])
def test_manifests_forged_by_hand_are_refused(kind: str, tmp_path: Path) -> None:
    old_checkpoint(kind, tmp_path)
    bodies = by_hand(document_of(tmp_path, 2))
    outcomes, slowest, grown, wrong = in_a_process(tmp_path, list(bodies.values()), SEED)
    print(f"C4: {kind}, {len(bodies)} by hand, {dict(outcomes)}, {slowest:.2f} s, {grown:.0f} MiB")  # noqa: T201
    assert not wrong, [(list(bodies)[int(line.split(":")[0])], line) for line in wrong]
    assert len(bodies) >= 60
    assert not outcomes["loaded"]
    assert slowest < 1
    assert grown < 64


def forge(path: Path, count: int, seed: int) -> None:
    for kind in KINDS:
        root = path / kind
        old_checkpoint(kind, root)
        outcomes, slowest, grown, wrong = in_a_process(root, -(-count // len(KINDS)), seed)
        print(f"C4: {kind}, {dict(outcomes)}, {slowest:.2f} s, {grown:.0f} MiB, seed {seed}")  # noqa: T201
        assert not wrong, wrong[:5]
        assert outcomes["CorruptCheckpoint"] > outcomes["loaded"]
        assert slowest < 1
        assert grown < 64


def test_generated_manifests_are_refused_or_are_buffers(tmp_path: Path) -> None:
    forge(tmp_path, trials("C4", 5_000), SEED)


@pytest.mark.long
def test_a_million_generated_manifests(tmp_path: Path) -> None:
    forge(tmp_path, trials("C4_LONG", 1_000_000), SEED)


# Planted files


class Planted:
    def __reduce__(self) -> Any:
        return os.system, ("exit 3",)


def planted(root: Path, outside: Path, what: str) -> None:
    """Put something in place of a file or a folder."""
    name, kind = what.split(" as ")
    target = {
        "manifest": root / "manifests" / "00000002.json",
        "state": root / "state" / "00000002.bin",
        "segment": root / "segments" / "00000002-0.bin",
        "FORMAT": root / "FORMAT",
        "folder": root / "state",
    }[name]
    shutil.move(target, outside)
    if kind == "link":
        target.symlink_to(outside)
    elif kind == "fifo":
        os.mkfifo(target)
    elif kind == "device":
        target.symlink_to("/dev/zero")
    elif kind == "folder":
        target.mkdir()
    else:
        target.write_bytes(pickle.dumps(Planted()))


_NAMES = ("manifest", "state", "segment", "FORMAT")
PLANTS = [f"{name} as {kind}" for name in _NAMES for kind in ("link", "fifo", "device", "folder", "pickle")]


def watch_load(root: Path, answer: Any) -> None:
    """Load under an audit hook; tell the error, and every forbidden event."""
    seen: list[str] = []
    watching = [False]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if not watching[0]:
            return
        if event in ("pickle.find_class", "exec", "compile", "os.system", "subprocess.Popen", "marshal.loads"):
            seen.append(f"{event} {arguments}")
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = os.path.normpath(os.path.join(root, os.fsdecode(arguments[0])))
            allowed = path.startswith((str(root), "/proc/meminfo", "/sys/fs/cgroup"))
            if not allowed or ".." in os.fsdecode(arguments[0]):
                seen.append(f"{event} {arguments}")

    sys.addaudithook(hook)
    watching[0] = True
    try:
        rc.load(root, number=2)
        told = "loaded"
    except rc.CheckpointError as error:
        told = type(error).__name__
    except BaseException as error:
        told = repr(error)
    watching[0] = False
    answer.put((told, seen))


def watched_load(root: Path) -> tuple[str, list[str]]:
    answer = _processes.Queue()
    process: Any = _processes.Process(target=watch_load, args=(root, answer))
    process.start()
    found = answer.get(timeout=60)
    process.join()
    return found


@pytest.mark.parametrize("what", [*PLANTS, "folder as link", "folder as fifo"])
def test_planted_files_are_refused_and_nothing_outside_is_touched(what: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    old_checkpoint("prioritized", root)
    planted(root, tmp_path / "outside", what)
    told, seen = watched_load(root)
    assert told in ("CorruptCheckpoint", "IncompatibleCheckpoint")
    assert seen == []
    assert check_tells(root)


def check_tells(root: Path) -> bool:
    try:
        return bool(check(root))
    except rc.CheckpointError:
        return True


def test_a_whole_checkpoint_is_loaded_without_code_and_from_its_folder_alone(tmp_path: Path) -> None:
    for kind in KINDS:
        old_checkpoint(kind, tmp_path / kind)
        assert watched_load(tmp_path / kind) == ("loaded", [])


def test_a_damaged_manifest_is_passed_over_whatever_it_is(tmp_path: Path) -> None:
    for what in PLANTS[:5]:
        root = tmp_path / what
        old_checkpoint("uniform", root)
        planted(root, tmp_path / f"{what} outside", what)
        with pytest.warns(UserWarning, match="passed over a damaged checkpoint for 1"):
            rc.load(root)


# Checkpoints of something else


def test_checkpoints_that_do_not_fit_here_say_so(tmp_path: Path) -> None:
    def changed(kind: str, edit: Any) -> Path:
        root = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        old_checkpoint(kind, root)
        document = document_of(root, 2)
        edit(document)
        write(root, 2, body_of(document))
        return root

    count = 0
    for kind in KINDS:
        for edit, error, words in (
            (lambda d: d.update(format=2), rc.IncompatibleCheckpoint, "format 1 at most, got 2"),
            (lambda d: d.update(kind="TokenBuffer"), rc.IncompatibleCheckpoint, "got TokenBuffer"),
            (lambda d: d["config"].update(device="cuda:0"), rc.IncompatibleCheckpoint, "device cuda:0"),
        ):
            if "cuda" in words and torch.cuda.is_available():
                continue
            root = changed(kind, edit)
            with pytest.raises(error, match=words):
                rc.load(root, number=2)
            count += 1
        root = tmp_path / f"format {kind}"
        old_checkpoint(kind, root)
        (root / "FORMAT").write_bytes(b"recollect checkpoint 2\n")
        with pytest.raises(rc.IncompatibleCheckpoint, match="FORMAT: expected format 1 at most, got 2"):
            rc.load(root)
        live = KINDS[kind].make()
        before = digest(live)
        with pytest.raises(rc.IncompatibleCheckpoint):
            live.save(root)  # a newer folder is not written to
        assert equal(digest(live), before)
        count += 2
    for kind, other in (("uniform", "rollout"), ("rollout", "distillation"), ("distillation", "uniform")):
        names = {"uniform": "ReplayBuffer", "rollout": "RolloutBuffer", "distillation": "DistillationBuffer"}
        root = changed(kind, lambda d, name=names[other]: d.update(kind=name))
        with pytest.raises(rc.CorruptCheckpoint):
            rc.load(root, number=2)
        count += 1
    for kind in ("uniform", "prioritized", "distillation"):
        root = tmp_path / f"capacity {kind}"
        old_checkpoint(kind, root)
        for capacity in (0, -1, 1.5, True, "7"):
            with pytest.raises((ValueError, TypeError), match="capacity"):
                rc.load(root, capacity=capacity)  # type: ignore[arg-type]
            count += 1
    print(f"C10: {count} that do not fit")  # noqa: T201
