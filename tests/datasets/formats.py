"""The formats with a writer and a reader, and replay buffers for round trips through them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import relive as rl
from relive.datasets import hdf5, lerobot, minari, zarr

_MODULES = {"h5py": "hdf5", "numcodecs": "zarr", "pyarrow": "lerobot", "PIL": "lerobot", "minari": "minari"}
for module, extra in _MODULES.items():
    pytest.importorskip(module, reason=f'needs {module}: pip install ".[{extra}]"')


class Format(NamedTuple):
    """A writer of datasets, and the reader of its datasets."""

    module: Any
    """The module in which the writer reads episodes."""
    write: Callable[[rl.ReplayBuffer, Path], Any]
    read: Callable[..., Any]
    """A function that takes the arguments of the reader: a path, a buffer and options."""


def _read_lerobot(path: Path, *arguments: Any, columns: Any = None, **options: Any) -> Any:
    """Read a dataset of a buffer without tasks."""
    return lerobot.from_lerobot(path, *arguments, columns={"task_index": None} | (columns or {}), **options)


FORMATS = {
    "robomimic.hdf5": Format(hdf5, hdf5.to_hdf5, hdf5.from_hdf5),
    "d4rl.hdf5": Format(hdf5, lambda replay, path: hdf5.to_hdf5(replay, path, layout="d4rl"), hdf5.from_hdf5),
    "folder.zarr": Format(zarr, zarr.to_zarr, zarr.from_zarr),
    "zipped.zarr.zip": Format(zarr, zarr.to_zarr, zarr.from_zarr),
    "lerobot": Format(lerobot, lambda replay, path: lerobot.to_lerobot(replay, path, fps=10), _read_lerobot),
    "minari-v0": Format(
        minari,
        lambda replay, path: minari.to_minari(replay, path.name),
        lambda path, *arguments, **options: minari.from_minari(path.name, *arguments, **options),
    ),
}
"""For each file name, its format. Minari writes into the folder of the fixture `folder`."""


DECLARED: dict[str, Any] = {
    "obs": {
        "camera": rl.Field((40, 36), torch.uint8),
        "pose": rl.Field(3, torch.float64),
        "pair": (rl.Field(2), rl.Field((), torch.int64)),
    },
    "action": rl.Field((), torch.int64),
    "reward": rl.Field((), torch.float64),
    "extra": {"info": {"success": rl.Field((), torch.bool), "force": rl.Field((2, 2)), "note": 3}},
}
"""The fields of `make_rich_replay`."""
ENDS = ((3, "terminated"), (1, "truncated"), (5, "cut"), (4, "truncated"))
"""Length and end of each episode of `make_rich_replay`."""


def make_replay(declared: dict[str, Any], episodes: Any, seed: int = 0) -> rl.ReplayBuffer:
    """Return a buffer of random steps, in episodes of the given lengths and ends."""
    rng = np.random.default_rng(seed)
    replay = rl.ReplayBuffer(2 * sum(length for length, _ in episodes) + 1, **declared, seed=0)
    trees = replay._schema.trees

    def draw(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {name: draw(part) for name, part in tree.items()}
        high = 2 if tree.dtype == torch.bool else 100
        numbers = rng.normal(size=tree.shape) if tree.dtype.is_floating_point else rng.integers(0, high, tree.shape)
        return torch.as_tensor(numbers).to(tree.dtype)

    for length, end in episodes:
        obs = draw(trees["obs"])
        for t in range(length):
            flags = {name: t == length - 1 and end == name for name in ("terminated", "truncated")}
            rest = {name: draw(tree) for name, tree in trees.items() if name not in ("obs", *flags)}
            next_obs = draw(trees["obs"])
            replay.add(obs, **rest, **flags, next_obs=next_obs)
            obs = next_obs
        replay.cut()
    return replay


def make_rich_replay() -> rl.ReplayBuffer:
    """Return a buffer with many kinds of fields and every kind of end."""
    return make_replay(DECLARED, ENDS)


_LEAVES = (
    rl.Field(()), rl.Field(1), rl.Field(3, torch.float64), rl.Field(2, torch.bfloat16), rl.Field((), torch.int16),
    rl.Field((2, 2), torch.int64), rl.Field((), torch.bool), rl.Field((4, 6, 3), torch.uint8),
)  # fmt: skip


@st.composite
def declarations(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """Draw the fields of a buffer that can be written in the format `name`."""
    leaf = st.sampled_from(_LEAVES)
    nested = {"deep": st.fixed_dictionaries({"er": leaf}), "action": leaf}
    tree = leaf if name == "d4rl.hdf5" else st.one_of(leaf, st.fixed_dictionaries(nested), st.tuples(leaf, leaf))
    rewards = [(), (1,), (2,), rl.Field((), torch.float64)]
    if name not in ("d4rl.hdf5", "minari-v0"):
        rewards.append({"fox": (), "hare": 2})
    extra = st.one_of(leaf, st.fixed_dictionaries(nested))
    extras = {"info": st.fixed_dictionaries(nested)} if name == "minari-v0" else {"note": leaf, "info": extra}
    return {
        "obs": draw(tree),
        "action": draw(tree),
        "reward": draw(st.sampled_from(rewards)),
        "extra": draw(st.fixed_dictionaries({}, optional=extras)),
    }


episodes = st.lists(st.tuples(st.integers(1, 6), st.sampled_from(["terminated", "truncated", "cut"])), min_size=1)
"""Lengths and ends of episodes."""


def leaves(steps: Any) -> dict[Any, torch.Tensor]:
    return {key: steps.get(key) for key in steps.keys(True, True) if key != "index"}


def assert_same(replay: rl.ReplayBuffer, other: rl.ReplayBuffer, *, narrowed: bool = False) -> None:
    """Assert that two buffers have the same episodes, bit for bit; `narrowed`: in the dtypes of a new buffer.

    A new buffer for a LeRobot dataset calls an observation without parts "state".
    """
    for mine, theirs in zip(replay.episodes(), other.episodes(), strict=True):
        expected, actual = leaves(mine), leaves(theirs)
        if "obs" in expected and narrowed:
            actual = {key[0] if key[1:] == ("state",) else key: leaf for key, leaf in actual.items()}
        assert expected.keys() == actual.keys()
        for key, leaf in expected.items():
            wide = leaf.float() if narrowed and leaf.dtype in (torch.float64, torch.bfloat16) else leaf
            assert wide.dtype == actual[key].dtype
            assert torch.equal(wide, actual[key]), key
