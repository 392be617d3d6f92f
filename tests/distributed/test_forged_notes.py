"""A shard that starts from a forged checkpoint raises a typed error, loads an older checkpoint, or works."""

import pytest

pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")

import copy
import random
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import relive as rl
from relive.checkpoint.saving import save
from relive.distributed import Checkpoint
from relive.distributed.shard import Shard
from tests.distributed.local import LocalCalls, make_client, make_plan, make_steps
from tests.faults.checkpoint.forgery import HOSTILE, State, body, forge_state_arrays, iter_nodes, read_document, write
from tests.totals import SEED, tell, trials


def saved_shard(root: Path) -> Any:
    """Return the plan of a service whose only shard has three checkpoints, the newest with a client."""
    plan = make_plan(16, 2, checkpoint=Checkpoint(root, seconds=1e9))
    client = make_client(LocalCalls(plan), plan)
    for first in (0, 4):
        client.extend(make_steps([0, 1], first, 4))
        client.save()
    return plan


def forged_note(document: Any, rng: random.Random) -> Any:
    """Change the note of a manifest in one to three places."""
    document = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 2, 3))):
        inside = list(iter_nodes(document["values"]["note"]))
        path = rng.choice(inside) if inside else ()
        parent, key = document["values"], "note"
        for step in path:
            parent, key = parent[key], step
        if rng.random() < 0.85:
            parent[key] = copy.deepcopy(rng.choice(HOSTILE))
        elif key != "note":
            del parent[key]
        if not isinstance(document["values"]["note"], dict | list):
            break
    return document


def outcome(plan: Any) -> str:
    """Start a shard and return the outcome, including the message of an error of an undocumented type."""
    with warnings.catch_warnings(record=True) as contents:
        warnings.simplefilter("always")
        shard = Shard(plan, 0)
    failure = shard._failure
    if failure is None:
        shard._buffer.check()
        shard.save()
        return "older" if any("skipped a damaged" in str(one.message) for one in contents) else "loaded"
    is_typed = isinstance(failure, rl.CorruptCheckpoint | rl.IncompatibleCheckpoint)
    return type(failure).__name__ if is_typed else f"untyped {type(failure).__name__}: {failure}"


def restored(root: Path, files: dict[Path, bytes]) -> None:
    for path in [*root.rglob("*.bin"), *root.rglob("*.json")]:
        if path not in files:
            path.unlink()
    for path, data in files.items():
        path.write_bytes(data)


def forge(root: Path, count: int, seed: int) -> Counter[str]:
    plan, rng, outcomes = saved_shard(root), random.Random(seed), Counter[str]()
    shard = root / "shard-0"
    number = max(int(path.stem) for path in (shard / "manifests").iterdir())
    files = {path: path.read_bytes() for path in [*shard.rglob("*.bin"), *shard.rglob("*.json")]}
    document = read_document(shard, number)
    for i in range(count):
        restored(shard, files)
        if i % 3:
            write(shard, number, body(forged_note(document, rng)))
        else:
            forge_state_arrays(State(shard, number), rng)
        outcomes[outcome(plan)] += 1
    return outcomes


@pytest.mark.thorough
def test_forged_notes_are_typed_errors_or_older_checkpoints(tmp_path: Path) -> None:
    outcomes = forge(tmp_path, trials("NOTES", 150), SEED)
    tell(f"notes of shards: {dict(outcomes)}, seed {SEED}")
    assert not [actual for actual in outcomes if actual.startswith("untyped")], outcomes
    assert outcomes["older"] > 0


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("positions", lambda x: x[:0]),
        ("positions", lambda x: x.fill_(-1)),
        ("positions", lambda x: x.double()),
        ("starts", lambda x: x[:0]),
        ("starts", lambda x: x.fill_(-1)),
        ("starts", lambda x: x + 10**6),
        ("starts", lambda x: x[:, :1]),
    ],
)
def test_a_note_that_cannot_be_is_passed_over_for_an_older_checkpoint(tmp_path: Path, name: str, change: Any) -> None:
    plan = saved_shard(tmp_path)
    shard = tmp_path / "shard-0"
    state = State(shard, max(int(path.stem) for path in (shard / "manifests").iterdir()))
    state.arrays[f"note.{name}"] = change(state.arrays[f"note.{name}"]).contiguous()
    state.write()
    with pytest.warns(UserWarning, match=f"skipped a damaged checkpoint and loaded number .*note.{name}"):
        assert Shard(plan, 0)._failure is None


def test_another_buffer_beside_a_note_is_refused(tmp_path: Path) -> None:
    plan = saved_shard(tmp_path)
    shard = tmp_path / "shard-0"
    note = read_document(shard, max(int(path.stem) for path in (shard / "manifests").iterdir()))["values"]["note"]
    other = tmp_path / "other"
    save(
        rl.ReplayBuffer(8, 3, 1, num_envs=2),
        other,
        note=(note, {"positions": torch.zeros(1, dtype=torch.int64), "starts": torch.zeros(1, 2, dtype=torch.int64)}),
    )
    shard.rename(tmp_path / "gone")
    other.rename(shard)
    failure = Shard(plan, 0)._failure
    assert isinstance(failure, rl.CorruptCheckpoint)
    assert "the buffer of this shard beside it" in str(failure)
