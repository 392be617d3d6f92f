"""Checkpoints and disk memory of every released format stay loadable.

`golden/` holds folders and, in `replies.json`, everything that the public API says of the buffer in each of them: its
rows, episodes, statistics and draws, before and after ten more steps. Internals may change as they like; the replies
may not. `python -m tests.checkpoint.test_golden` wrote them, and refuses to write a format again.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

import relive as rl
from relive import kernels
from relive.storage import disk
from tests.checkpoint.traffic import KINDS, Kind

GOLDEN = Path(__file__).parent / "golden"
CHECKPOINTS, DISK = GOLDEN / "format-1", GOLDEN / "disk-1"
REPLAYS = [kind for kind, subject in KINDS.items() if isinstance(subject.make(), rl.ReplayBuffer)]
FOLDERS = [
    *(("format-1", kind) for kind in KINDS),
    *(("disk-1", kind) for kind in REPLAYS),
    *(("disk-1", f"{kind}, killed") for kind in REPLAYS),
]


@pytest.mark.parametrize(("written", "kind"), FOLDERS)
def test_a_folder_of_format_1_is_read_as_it_was_written(written: str, kind: str, tmp_path: Path) -> None:
    expected = json.loads((GOLDEN / written / "replies.json").read_text())
    if written.startswith("disk") and (kernels.native_core() is None or sys.platform != "linux"):
        pytest.skip("disk memory needs Linux and the native core")
    assert _same(_replies(GOLDEN / written / _folder(kind), _subject(kind), tmp_path), expected[kind])


def test_every_golden_folder_is_compared() -> None:
    there = {(root.name, path.name) for root in (CHECKPOINTS, DISK) for path in root.iterdir() if path.is_dir()}
    assert there == {(written, _folder(kind)) for written, kind in FOLDERS}


def _folder(kind: str) -> str:
    return kind.replace(", ", "_").replace(" ", "_")


def _subject(kind: str) -> Kind:
    return KINDS[kind.removesuffix(", killed")]


def _replies(folder: Path, subject: Kind, scratch: Path) -> Any:
    """Return the replies of the public API for a copy of the buffer in a folder."""
    root = scratch / folder.name
    shutil.copytree(folder, root)
    buffer: Any = rl.load(root)
    buffer.check()
    replies = _stored(buffer) | {"batches": [subject.read(buffer) for _ in range(2)]}
    for n in range(35, 45):
        subject.act(buffer, n)
    replies |= {"ten steps later": _stored(buffer) | {"batches": [subject.read(buffer) for _ in range(2)]}}
    if hasattr(buffer, "close"):
        buffer.close()
    return json.loads(json.dumps(_plain(replies)))


def _stored(buffer: Any) -> dict[str, Any]:
    """Return everything that is stored and counted, without drawing."""
    replies: dict[str, Any] = {"len": len(buffer)}
    if getattr(buffer, "stats", None) is not None:
        replies |= {"statistics": buffer.stats.summary(), "finished": buffer.stats.episodes()}
    if isinstance(buffer, rl.ReplayBuffer):
        norms = {name: [norm.count, norm.mean, norm.std] for name, norm in buffer.norm.items()}
        episodes = [episode.to_dict() for episode in buffer.episodes()]
        rows = {"ids": buffer.ids(), "rows": buffer[buffer.ids()].to_dict(), "open": buffer.is_open}
        replies |= {"norms": norms, "episodes": episodes} | rows
    if isinstance(buffer, rl.RolloutBuffer):
        replies |= {"steps": buffer.num_stored, "data": buffer.data.to_dict(), "final_obs": buffer.final_obs.to_dict()}
    return replies


def _plain(node: Any) -> Any:
    """Convert tensors to dtypes and numbers. JSON keeps floats exactly."""
    if isinstance(node, TensorDictBase):
        return _plain(node.to_dict())
    if isinstance(node, dict):
        # No step had a log_prob: the format does not promise whether batches then contain one.
        return {str(key): _plain(value) for key, value in node.items() if key != "log_prob"}
    if isinstance(node, list | tuple):
        return [_plain(item) for item in node]
    if isinstance(node, torch.Tensor):
        return [str(node.dtype), node.double().tolist() if node.is_floating_point() else node.tolist()]
    return node.item() if hasattr(node, "item") else node


_ROUNDED = {"weight", "statistics", "norms"}
"""Replies computed on demand, with powers and sums that differ between processors in the last bit."""


def _same(replies: Any, expected: Any, *, rounded: bool = False) -> bool:
    if isinstance(expected, dict):
        keys = replies.keys() == expected.keys()
        return keys and all(_same(replies[key], expected[key], rounded=rounded or key in _ROUNDED) for key in expected)
    if isinstance(expected, list):
        return len(replies) == len(expected) and all(
            _same(*pair, rounded=rounded) for pair in zip(replies, expected, strict=True)
        )
    return (
        math.isclose(replies, expected, rel_tol=1e-6)
        if rounded and isinstance(expected, float)
        else replies == expected
    )


def _write(root: Path, make: Callable[[str], None], kinds: list[str], scratch: Path) -> None:
    if (root / "replies.json").exists():
        print(f"{root.name}: a format that was written once is not written again")  # noqa: T201
        return
    for kind in kinds:
        if not (root / _folder(kind)).exists():
            make(kind)
    replies = {kind: _replies(root / _folder(kind), _subject(kind), scratch / root.name) for kind in kinds}
    (root / "replies.json").write_text(json.dumps(replies) + "\n")


def _checkpoint(kind: str) -> None:
    subject, root = KINDS[kind], CHECKPOINTS / _folder(kind)
    buffer = subject.make()
    for n in range(35):
        subject.act(buffer, n)
        if n in (15, 34):
            buffer.save(root, keep=1)
    (root / "tmp").rmdir()


def _disk_memory(kind: str) -> None:
    subject, root = _subject(kind), DISK / _folder(kind)
    source = subject.make()
    source.save(root.with_name("tmp"))
    replay: Any = rl.load(root.with_name("tmp"), device=rl.Memory.disk(root))
    shutil.rmtree(root.with_name("tmp"))
    for n in range(35):
        subject.act(replay, n)
        if n == 20:
            replay.commit()
    if kind.endswith(", killed"):
        shutil.copytree(root, root.with_name("copy"))
        replay.close()
        shutil.rmtree(root)
        root.with_name("copy").rename(root)
    else:
        replay.close()


if __name__ == "__main__":
    import tempfile

    disk.read_boot_id = lambda: "the machine that wrote the golden folders"
    with tempfile.TemporaryDirectory() as folder:
        _write(CHECKPOINTS, _checkpoint, list(KINDS), Path(folder))
        _write(DISK, _disk_memory, [kind for written, kind in FOLDERS if written == "disk-1"], Path(folder))
