"""C: damaged, forged and planted files, and checkpoints of something else."""

from __future__ import annotations

import os
import pickle
import random
import re
import resource
import shutil
import sys
import time
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from relive.inspector.saved import verify
from relive.schema.fields import parse_path
from relive.storage.codec import JsonNode
from tests.checkpoint.traffic import KINDS, digest, equal
from tests.faults.checkpoint.disk import save_old_checkpoint
from tests.faults.checkpoint.forgery import (
    State,
    forge_by_hand,
    forge_document,
    forge_state_arrays,
    read_document,
    write,
)
from tests.faults.checkpoint.forgery import body as body_of
from tests.faults.digest import digest as whole_digest
from tests.faults.processes import apart
from tests.tiers import select
from tests.totals import SEED, tell, trials


def checked_files(root: Path, number: int = 2) -> list[Path]:
    """Return the files of a checkpoint."""
    document = read_document(root, number)
    segments = [root / "segments" / segment["name"] for segment in document["segments"]]
    manifest = root / "manifests" / f"{number:08}.json"
    return [root / "FORMAT", manifest, root / "state" / document["state"]["name"], *segments]


@pytest.mark.promise("C1")
@pytest.mark.parametrize("kind", select("prioritized", "rollout", of=KINDS))
def test_a_file_of_another_length_is_named(kind: str, tmp_path: Path) -> None:
    save_old_checkpoint(kind, tmp_path)
    rng, count = random.Random(SEED), 0
    for path in checked_files(tmp_path):
        data = path.read_bytes()
        for trial in range(trials("C1", 200)):
            cut = rng.randrange(len(data))
            path.write_bytes(data[:cut] if trial % 2 else data + rng.randbytes(rng.choice((1, 2, 8, 4096))))
            with pytest.raises(rl.CheckpointError) as caught:
                rl.load(tmp_path, number=2)
            assert path.name in str(caught.value), f"seed {SEED}"
            assert re.search(r"bytes \d+ to \d+|expected \d+ bytes, got \d+|format 1 at most", str(caught.value))
            assert isinstance(caught.value, rl.CorruptCheckpoint | rl.IncompatibleCheckpoint)
            count += 1
        path.write_bytes(data)
    tell(f"C1: {kind}, {count} lengths, seed {SEED}")


def flip_bits(path: Path, count: int, seed: int) -> None:
    rng, found = random.Random(seed), Counter[str]()
    for kind in KINDS:
        root = path / kind
        save_old_checkpoint(kind, root)
        files = checked_files(root)
        for trial in range(-(-count // len(KINDS))):
            file = files[trial % len(files)]
            data = file.read_bytes()
            bit = rng.randrange(8 * len(data))
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            file.write_bytes(damaged)
            refusal: Exception | None = None
            try:
                rl.load(root, number=2)
            except (rl.CorruptCheckpoint, rl.IncompatibleCheckpoint) as error:
                refusal = error
            assert refusal is not None, f"seed {seed}: bit {bit} of {file} was not seen"
            assert file.name in str(refusal), f"seed {seed}: bit {bit} of {file}"
            assert re.search(r"bytes \d+ to \d+|format 1 at most", str(refusal)), str(refusal)
            found[type(refusal).__name__] += 1
            file.write_bytes(data)
    tell(f"C2: {dict(found)}, seed {seed}")


def test_every_flipped_bit_of_a_manifests_first_line_is_detected(tmp_path: Path) -> None:
    """The first line includes the version, which no checksum covers."""
    save_old_checkpoint("distillation", tmp_path)
    manifest = checked_files(tmp_path)[1]
    data = manifest.read_bytes()
    for bit in range(8 * (data.index(b"\n") + 1)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        manifest.write_bytes(damaged)
        with pytest.raises((rl.CorruptCheckpoint, rl.IncompatibleCheckpoint), match="00000002.json"):
            rl.load(tmp_path, number=2)


@pytest.mark.promise("C2")
@pytest.mark.parametrize("count", select(500, of=[500, 2_000]))
def test_every_flipped_bit_is_detected(count: int, tmp_path: Path) -> None:
    flip_bits(tmp_path, trials("C2", count), SEED)


@pytest.mark.long
def test_each_of_many_flipped_bits_is_detected(tmp_path: Path) -> None:
    flip_bits(tmp_path, trials("C2_LONG", 50_000), SEED)


def test_the_contents_of_lock_and_tmp_do_not_matter(tmp_path: Path) -> None:
    old = save_old_checkpoint("prioritized", tmp_path)
    (tmp_path / "LOCK").write_bytes(b"anything")
    (tmp_path / "tmp" / "rest").write_bytes(b"half a segment")
    assert equal(digest(rl.load(tmp_path)), old)
    (tmp_path / "LOCK").unlink()
    assert equal(digest(rl.load(tmp_path)), old)


Outcome = tuple[Counter[str], float, float, list[str]]


LOAD_SECONDS = 1.0
"""CPU seconds that a load of a small checkpoint may take at most."""


def timed_load(root: Path) -> tuple[float, str, str]:
    """Load a checkpoint; return the CPU seconds of this process, "loaded" or the type of the error, and its message."""
    began, outcome, message = time.process_time(), "loaded", ""
    try:
        rl.load(root, number=2)
    except BaseException as error:
        outcome, message = type(error).__name__, str(error)
    return time.process_time() - began, outcome, message


def read_forged(root: Path, bodies: list[bytes] | int, seed: int) -> Outcome:
    """Load each manifest; return the counts of outcomes, the largest CPU time, the MiB of growth, and wrong errors.

    A load that is too slow is measured again, because a busy machine makes one of many slow.
    """
    outcomes, slowest, wrong = Counter[str](), 0.0, list[str]()
    rng, document = random.Random(seed), read_document(root, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rl.load(root, number=2)
        start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for i in range(bodies if isinstance(bodies, int) else len(bodies)):
            write(root, 2, body_of(forge_document(document, rng)) if isinstance(bodies, int) else bodies[i])
            seconds, outcome, message = timed_load(root)
            if seconds >= LOAD_SECONDS:
                seconds = min(seconds, timed_load(root)[0])
            slowest = max(slowest, seconds)
            if outcome in ("loaded", "CorruptCheckpoint", "IncompatibleCheckpoint"):
                outcomes[outcome] += 1
            else:
                wrong.append(f"{i}: {outcome}: {message}"[:300])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) / 1024
    return outcomes, slowest, grown, wrong


@pytest.mark.promise("C4")
@pytest.mark.parametrize("kind", ["prioritized", "rollout", "distillation"])
def test_manifests_forged_by_hand_are_refused(kind: str, tmp_path: Path) -> None:
    save_old_checkpoint(kind, tmp_path)
    bodies = forge_by_hand(read_document(tmp_path, 2))
    outcomes, slowest, grown, wrong = apart(read_forged, tmp_path, list(bodies.values()), SEED)
    tell(f"C4: {kind}, {len(bodies)} by hand, {dict(outcomes)}, {slowest:.2f} s, {grown:.0f} MiB")
    assert not wrong, [(list(bodies)[int(line.split(":")[0])], line) for line in wrong]
    assert len(bodies) >= 60
    assert not outcomes["loaded"]
    assert slowest < LOAD_SECONDS
    assert grown < 64


CLAIMS: dict[str, tuple[str, tuple[str, ...], Any]] = {
    "environments": ("rollout", ("config", "num_envs"), 2**32),
    "environments of a ring": ("uniform", ("config", "num_envs"), 2**32),
    "a window": ("rollout", ("config", "listeners", "stats", "window"), 2**31),
    "steps": ("rollout", ("config", "num_steps"), 2**49),
    "rows": ("prioritized", ("config", "capacity"), 3 * 2**48),
    "no parts of a field": ("uniform", ("config", "obs"), []),
    "few parts of a norm": ("uniform", ("config", "listeners", "norm"), [[["obs"], [2]]]),
    "no device": ("rollout", ("config", "device"), "meta"),
    "a generator": ("uniform", ("values", "random", "has_uint32"), 2**31),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_impossible_settings_in_a_manifest_are_refused(name: str, tmp_path: Path) -> None:
    kind, path, value = CLAIMS[name]
    save_old_checkpoint(kind, tmp_path)
    document = read_document(tmp_path, 2)
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    write(tmp_path, 2, body_of(document))
    with pytest.raises(rl.CorruptCheckpoint):
        rl.load(tmp_path, number=2)


def forge(path: Path, count: int, seed: int) -> None:
    for kind in KINDS:
        root = path / kind
        save_old_checkpoint(kind, root)
        outcomes, slowest, grown, wrong = apart(read_forged, root, -(-count // len(KINDS)), seed, timeout=7200)
        tell(f"C4: {kind}, manifests {dict(outcomes)}, {slowest:.2f} s, {grown:.0f} MiB, seed {seed}")
        assert not wrong, wrong[:5]
        assert outcomes["CorruptCheckpoint"] > outcomes["loaded"]
        assert slowest < LOAD_SECONDS
        assert grown < 64


@pytest.mark.thorough
def test_generated_manifests_are_refused_or_are_buffers(tmp_path: Path) -> None:
    forge(tmp_path, trials("C4", 5_000), SEED)


@pytest.mark.long
def test_a_million_generated_manifests(tmp_path: Path) -> None:
    forge(tmp_path, trials("C4_LONG", 1_000_000), SEED)


def read_states(kind: str, root: Path, count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Load forged states; return the counts of outcomes, and failures: other errors, or buffers that do not work."""
    outcomes, wrong, rng = Counter[str](), list[str](), random.Random(seed)
    original = State(root, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(count):
            what = forge_state_arrays(original, rng)
            try:
                buffer = rl.load(root, number=2)
                outcomes["loaded"] += 1
                use_loaded_buffer(kind, buffer)
            except (rl.CorruptCheckpoint, rl.IncompatibleCheckpoint) as error:
                outcomes[type(error).__name__] += 1
            except BaseException as error:
                wrong.append(f"{i}: {what}: {type(error).__name__}: {error}"[:400])
    return outcomes, wrong


CHECK = {kind: kind.check for kind in (rl.ReplayBuffer, rl.RolloutBuffer, rl.DistillationBuffer)}
"""The original `check` of each class: canaries replace it."""


def use_loaded_buffer(kind: str, buffer: Any) -> None:
    """Use a loaded buffer; forged rewards, flags and counts may be refused, but must not break it."""
    CHECK[type(buffer)](buffer)
    for n in range(60, 64):
        with suppress(rl.PriorityError, rl.NotReadyError, OverflowError):
            KINDS[kind].act(buffer, n)
        KINDS[kind].read(buffer)
    CHECK[type(buffer)](buffer)


def forge_states(path: Path, count: int, seed: int) -> None:
    for kind in KINDS:
        root = path / kind
        save_old_checkpoint(kind, root)
        outcomes, wrong = apart(read_states, kind, root, -(-count // len(KINDS)), seed, timeout=7200)
        tell(f"C4: {kind}, states {dict(outcomes)}, seed {seed}")
        assert not wrong, wrong[:5]
        assert outcomes["CorruptCheckpoint"] > 0


@pytest.mark.thorough
def test_generated_states_are_refused_or_are_buffers(tmp_path: Path) -> None:
    forge_states(tmp_path, trials("C4_STATES", 1_400), SEED)


@pytest.mark.long
def test_many_generated_states_are_refused_or_are_buffers(tmp_path: Path) -> None:
    forge_states(tmp_path, trials("C4_STATES_LONG", 20_000), SEED)


def no_transition(kinds: torch.Tensor) -> None:
    """Change the kind of the first transition."""
    kinds.view(-1)[int((kinds.view(-1) == 1).nonzero()[0])] = 2


BY_HAND: dict[str, tuple[str, str, Any, str]] = {
    "a negative head": ("uniform", "ring.head", lambda x: x[0].fill_(-1), "state: ring.head[0]: expected a row"),
    "a head beyond all": ("uniform", "ring.head", lambda x: x[1].fill_(2**62), "state: ring.head[1]: expected a row"),
    "a later head": ("uniform", "ring.head", lambda x: x[0].add_(1), "segments, environment 0: expected rows up to"),
    "a floor above": (
        "uniform",
        "ring.floor",
        lambda x: x[2].fill_(10**6),
        "state: ring.floor[2]: expected a row of 0 to",
    ),
    "too many": ("uniform", "ring.count", lambda x: x[0].fill_(10**6), "state: ring.count[0]: expected the number of"),
    "no kind": (
        "uniform",
        "ring.kind",
        lambda x: x[0, 1].fill_(9),
        "state: ring.kind[0, 1]: expected a kind of 0 to 4",
    ),
    "a kind of another row": ("uniform", "ring.kind", no_transition, "state: ring.count"),
    "no flag": ("uniform", "ring.open", lambda x: x.view(torch.uint8)[0].fill_(7), "ring.open: expected bools"),
    "open and closed": ("uniform", "ring.open", lambda x: x.logical_not_(), "segments"),
    "resets without a reason": ("next step", "ring.resetting", lambda x: x.fill_(True), "the contents are invalid"),
    "NaN priorities": ("prioritized", "sampler.mass", lambda x: x[:3].fill_(float("nan")), "state: sampler"),
    "negative priorities": ("prioritized", "sampler.mass", lambda x: x.neg_(), "state: sampler"),
    "infinite priorities": ("prioritized", "sampler.mass", lambda x: x[0].fill_(float("inf")), "state: sampler"),
    "priorities of nothing": ("prioritized", "sampler.mass", lambda x: x.add_(1), "0 where there is no transition"),
    "a negative largest": ("prioritized", "sampler.largest", lambda x: x.fill_(-1), "state: sampler"),
    "draws before zero": (
        "prioritized",
        "sampler.draws",
        lambda x: x.fill_(-5),
        "draws: expected a number of at least 0",
    ),
    "an epoch of strangers": (
        "epochs",
        "sampler.ids",
        lambda x: x.fill_(10**12),
        "epoch[0]: expected ids of transitions",
    ),
    "an epoch of one row": ("epochs", "sampler.ids", lambda x: x.fill_(int(x.max())), "epoch: expected every row"),
    "rounds out of order": (
        "distillation",
        "ring.starts",
        lambda x: x.copy_(x.flip(0)),
        "ring.starts: expected rising rows",
    ),
    "rounds to come": (
        "distillation",
        "ring.starts",
        lambda x: x[-1].fill_(10**9),
        "ring.starts: expected rising rows",
    ),
    "finals of no step": ("rollout", "finals.places", lambda x: x.fill_(99), "state: finals.places"),
    "statistics of no time": ("uniform", "listeners.stats.counts", lambda x: x.fill_(-3), "the contents are invalid"),
}


@pytest.mark.promise("C4")
@pytest.mark.parametrize("name", BY_HAND)
def test_impossible_numbers_are_refused_by_name(name: str, tmp_path: Path) -> None:
    kind, array, edit, words = BY_HAND[name]
    advanced_checkpoint(kind, tmp_path)
    state = State(tmp_path, 2)
    edit(state.arrays[array])
    state.write()
    with pytest.raises(rl.CorruptCheckpoint, match=re.escape(words)):
        rl.load(tmp_path, number=2)


def advanced_checkpoint(kind: str, root: Path) -> None:
    """Save as `save_old_checkpoint` does, but within an epoch and with stored final observations."""
    buffer = KINDS[kind].make()
    for n in range(26):
        KINDS[kind].act(buffer, n)
        if kind == "epochs" and n > 5:
            buffer.sample(1)
        if n == 17:
            buffer.save(root)
    for _ in range(8 if kind == "epochs" else 0):
        buffer.sample(1)
    buffer.save(root)


class Planted:
    def __reduce__(self) -> Any:
        return os.system, ("exit 3",)


def plant(root: Path, outside: Path, what: str) -> None:
    """Replace a file or folder by something else."""
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


def watch_load(root: Path) -> tuple[str, list[str]]:
    """Load under an audit hook; return the error and every forbidden event."""
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
        rl.load(root, number=2)
        refusal = "loaded"
    except rl.CheckpointError as error:
        refusal = type(error).__name__
    except BaseException as error:
        refusal = repr(error)
    watching[0] = False
    return refusal, seen


@pytest.mark.promise("C5")
@pytest.mark.parametrize("what", [*PLANTS, "folder as link", "folder as fifo"])
def test_planted_files_are_refused_and_nothing_outside_is_touched(what: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    save_old_checkpoint("prioritized", root)
    plant(root, tmp_path / "outside", what)
    refusal, seen = apart(watch_load, root)
    assert refusal in ("CorruptCheckpoint", "IncompatibleCheckpoint")
    assert seen == []
    assert check_tells(root)


def check_tells(root: Path) -> bool:
    try:
        return any(error is not None for _, error in verify(root))
    except rl.CheckpointError:
        return True


def test_a_whole_checkpoint_is_loaded_without_code_and_from_its_folder_alone(tmp_path: Path) -> None:
    for kind in KINDS:
        save_old_checkpoint(kind, tmp_path / kind)
        assert apart(watch_load, tmp_path / kind) == ("loaded", [])


def test_any_damaged_manifest_is_skipped(tmp_path: Path) -> None:
    for what in PLANTS[:5]:
        root = tmp_path / what
        save_old_checkpoint("uniform", root)
        plant(root, tmp_path / f"{what} outside", what)
        with pytest.warns(UserWarning, match="skipped a damaged checkpoint and loaded number 1"):
            rl.load(root)


@pytest.mark.promise("C10")
def test_checkpoints_that_do_not_fit_here_say_so(tmp_path: Path) -> None:
    def changed(kind: str, edit: Any) -> Path:
        root = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        save_old_checkpoint(kind, root)
        document = read_document(root, 2)
        edit(document)
        write(root, 2, body_of(document), version=document["format"])
        return root

    count = 0
    for kind in KINDS:
        for edit, error, words in (
            (lambda d: d.update(format=2), rl.IncompatibleCheckpoint, "format 1 at most, got 2"),
            (lambda d: d.update(kind="TokenBuffer"), rl.IncompatibleCheckpoint, "got TokenBuffer"),
            (lambda d: d["config"].update(device="cuda:0"), rl.IncompatibleCheckpoint, "device: .*, got 'cuda:0'"),
        ):
            if "cuda" in words and torch.cuda.is_available():
                continue
            root = changed(kind, edit)
            with pytest.raises(error, match=words):
                rl.load(root, number=2)
            count += 1
        root = tmp_path / f"format {kind}"
        save_old_checkpoint(kind, root)
        (root / "FORMAT").write_bytes(b"recollect checkpoint 2\n")
        with pytest.raises(rl.IncompatibleCheckpoint, match="FORMAT: expected format 1 at most, got 2"):
            rl.load(root)
        live = KINDS[kind].make()
        before = digest(live)
        with pytest.raises(rl.IncompatibleCheckpoint):
            live.save(root)
        assert equal(digest(live), before)
        count += 2
    for kind, other in (("uniform", "rollout"), ("rollout", "distillation"), ("distillation", "uniform")):
        names = {"uniform": "ReplayBuffer", "rollout": "RolloutBuffer", "distillation": "DistillationBuffer"}
        root = changed(kind, lambda d, name=names[other]: d.update(kind=name))
        with pytest.raises(rl.CorruptCheckpoint):
            rl.load(root, number=2)
        count += 1
    tell(f"C10: {count} that do not fit")


def step_of(shape: int, dtype: Any = np.float32) -> dict[str, Any]:
    return {
        "obs": np.zeros((3, shape), dtype), "action": np.zeros((3, 1)), "reward": np.zeros(3),
        "terminated": np.zeros(3, bool), "truncated": np.zeros(3, bool), "next_obs": np.ones((3, shape), dtype),
    }  # fmt: skip


ARGUMENTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "another sampler": ("uniform", {"sampler": rl.Prioritized()}, "sampler: expected the state of Prioritized"),
    "no priorities": (
        "prioritized",
        {"sampler": rl.Uniform()},
        r"sampler: expected the state of Uniform\(\), got \['draws'",
    ),
    "an epoch less": (
        "epochs",
        {"sampler": rl.Uniform()},
        r"sampler: expected the state of Uniform\(\), got \['ids'\]",
    ),
}


@pytest.mark.promise("C10")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_load_explains_requests_that_it_cannot_fulfil(name: str, tmp_path: Path) -> None:
    kind, arguments, words = ARGUMENTS[name]
    old = save_old_checkpoint(kind, tmp_path)
    with pytest.raises(rl.IncompatibleCheckpoint, match=words):
        rl.load(tmp_path, **arguments)
    assert equal(digest(rl.load(tmp_path)), old)


@pytest.mark.promise("C10")
@pytest.mark.parametrize("kind", KINDS)
def test_too_little_memory_is_a_typed_error(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = save_old_checkpoint(kind, tmp_path)
    monkeypatch.setattr("relive.storage.allocator.available_host_bytes", lambda: 100)
    with pytest.raises(rl.IncompatibleCheckpoint, match="the buffer does not fit into the memory of this machine"):
        rl.load(tmp_path)
    monkeypatch.undo()
    assert equal(digest(rl.load(tmp_path)), old)


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_device_is_a_typed_error(kind: str, tmp_path: Path) -> None:
    save_old_checkpoint(kind, tmp_path)
    name = "mps" if torch.cuda.is_available() else "cuda"
    with pytest.raises(rl.IncompatibleCheckpoint, match=f"device: expected a device of this machine, got '{name}"):
        rl.load(tmp_path, device=name)


OTHERS: dict[str, dict[str, Any]] = {
    "another shape": {"obs": 3},
    "another dtype": {"obs": rl.Field(2, torch.float64)},
    "another name": {"obs": {"x": 2}},
    "another field": {"extra": {"tag": ()}},
    "another capacity": {"capacity": 24},
    "other environments": {"num_envs": 6},
    "another sampler": {"sampler": rl.Prioritized()},
    "stored next_obs": {"next_obs": "stored"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_state_of_another_buffer_is_refused_and_changes_nothing(name: str) -> None:
    settings: dict[str, Any] = {"capacity": 12, "obs": 2, "action": 1, "num_envs": 3, "seed": 0}
    mine = rl.ReplayBuffer(**settings)
    for _ in range(3):
        mine.add(**step_of(2))
    before = whole_digest(mine)
    with pytest.raises(rl.SchemaError, match="load_state_dict: \\w+: expected"):
        mine.load_state_dict(rl.ReplayBuffer(**(settings | OTHERS[name])).state_dict())
    assert whole_digest(mine) == before


def test_a_path_without_names_is_corrupt() -> None:
    with pytest.raises(rl.CorruptCheckpoint, match="expected at least one name"):
        parse_path(JsonNode("values.rows.attached", []))
