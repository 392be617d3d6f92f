"""Zarr stores written by diffusion policy, and by zarr in formats 2 and 3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from relive.datasets import from_zarr, to_zarr
from tests.datasets.formats import make_rich_replay
from tests.tiers import select

pytest.importorskip("numcodecs", reason='needs zarr: pip install ".[zarr]"')

SAMPLES = Path(__file__).parent / "samples"


@pytest.mark.parametrize("name", ["diffusion_policy.zarr", "diffusion_policy.zarr.zip"])
def test_a_store_of_diffusion_policy_is_read(name: str) -> None:
    replay = from_zarr(SAMPLES / name, columns={"n_contacts": "contacts"}, seed=0)
    assert (len(replay), replay.capacity) == (12, 12 + 3)
    first, second, third = replay.episodes()
    assert second["obs", "state"].tolist() == [[10, -10], [11, -11], [12, -12]]
    assert second["next_obs", "state"].tolist() == [[11, -11], [12, -12], [12, -12]], "the last one again"
    assert second["action"].tolist() == [[10.5, 1], [11.5, 1], [12.5, 1]]
    assert second["truncated"].tolist() == [False, False, True], "an episode's end says nothing of the task"
    assert not second["terminated"].any()
    assert not second["reward"].any()
    assert third["obs", "img"].dtype == torch.uint8
    assert third["obs", "img"][:, 7, 7, 2].tolist() == [20, 21, 22, 23, 24]
    assert first["contacts"].tolist() == [[0], [1], [0], [1]]


def test_a_last_step_can_be_left_out() -> None:
    path = SAMPLES / "diffusion_policy.zarr"
    dropped = from_zarr(path, final_obs="drop", columns={"n_contacts": None})
    assert [len(one) for one in dropped.episodes()] == [3, 2, 4]
    assert [one["truncated"].tolist()[-2:] for one in dropped.episodes()] == [[False, True]] * 3
    assert next(dropped.episodes())["next_obs", "state"][-1].tolist() == [3, -3]
    with pytest.warns(rl.DataWarning, match="from_zarr: expected a next observation for every step, got 3 last steps"):
        from_zarr(path, final_obs=None)


def test_columns_without_a_field_of_their_name_are_observations() -> None:
    replay = from_zarr(SAMPLES / "diffusion_policy.zarr")
    assert set(next(replay.episodes())["obs"].keys()) == {"img", "state", "n_contacts"}
    extra = rl.ReplayBuffer(
        20, obs={"img": rl.Field((8, 8, 3), torch.uint8), "state": 2}, action=2, extra={"n_contacts": 1}
    )
    from_zarr(SAMPLES / "diffusion_policy.zarr", extra)
    assert next(extra.episodes())["n_contacts"].tolist() == [[0], [1], [0], [1]]


def written_by_zarr(path: Path, zarr_format: int, **options: Any) -> dict[str, np.ndarray]:
    """Write a store with zarr; return its arrays."""
    zarr = pytest.importorskip("zarr", minversion="3", reason="needs zarr 3")
    rng = np.random.default_rng(0)
    arrays = {
        "action": rng.normal(size=(10, 3)),
        "depth": rng.integers(0, 60_000, (10, 5, 7)).astype(">u2"),
        "reward": np.zeros(10, np.float32),
        "terminated": np.arange(10) == 9,
    }
    store: Any = zarr.storage.ZipStore(path, mode="w") if path.suffix == ".zip" else path
    root = zarr.create_group(store, zarr_format=zarr_format)
    for name, array in arrays.items():
        chunks = (4, 2, 3)[: array.ndim]
        made = root.create_array(f"data/{name}", shape=array.shape, dtype=array.dtype, chunks=chunks, **options)
        made[...] = array
    ends = root.create_array("meta/episode_ends", shape=(3,), dtype="int64", chunks=(3,))
    ends[...] = [3, 4, 10]
    if path.suffix == ".zip":
        store.close()
    return arrays


@pytest.mark.parametrize("suffix", select(".zarr", of=[".zarr", ".zip"]))
@pytest.mark.parametrize(
    ("zarr_format", "options"),
    [
        (2, {}),
        (2, {"order": "F", "fill_value": 0}),
        (2, {"compressors": None, "chunk_key_encoding": {"name": "v2", "separator": "/"}}),
        (3, {}),
        (3, {"compressors": None}),
        (3, {"compressors": {"name": "gzip", "configuration": {"level": 1}}}),
        (3, {"compressors": {"name": "blosc", "configuration": {"cname": "zstd", "shuffle": "bitshuffle"}}}),
        (3, {"chunk_key_encoding": {"name": "v2", "separator": "."}, "fill_value": 0}),
    ],
)
def test_stores_of_both_zarr_formats_are_read(zarr_format: int, options: Any, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"store{suffix}"
    arrays = written_by_zarr(path, zarr_format, **options)
    replay = from_zarr(path, rl.ReplayBuffer(20, {"depth": rl.Field((5, 7), torch.uint16)}, rl.Field(3, torch.float64)))
    assert [len(one) for one in replay.episodes()] == [3, 1, 6]
    rows = replay[replay.ids()]
    assert np.array_equal(rows["obs", "depth"].numpy(), arrays["depth"])
    assert np.array_equal(rows["action"].numpy(), arrays["action"])
    assert rows["terminated"].tolist() == arrays["terminated"].tolist()
    assert rows["truncated"].tolist() == [False, False, True, True] + [False] * 6


@pytest.mark.parametrize("codec", ["zstd", "lz4", "zlib", "gzip", "blosc"])
def test_every_compressor_of_format_2_is_read(codec: str, tmp_path: Path) -> None:
    numcodecs = pytest.importorskip("numcodecs", reason='needs zarr: pip install ".[zarr]"')
    written_by_zarr(tmp_path / "s.zarr", 2, compressors=numcodecs.get_codec({"id": codec}))
    assert len(from_zarr(tmp_path / "s.zarr")) == 10


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shards": (8, 4, 6)}, "expected the codec 'bytes' and one compressor, got 'sharding_indexed'"),
        ({"filters": [{"name": "transpose", "configuration": {"order": (0, 1, 2)}}]}, "got 'transpose', 'bytes'"),
    ],
)
def test_unsupported_codecs_are_refused(options: Any, words: str, tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr", minversion="3", reason="needs zarr 3")
    written_by_zarr(tmp_path / "s.zarr", 3)
    root = zarr.open_group(tmp_path / "s.zarr", mode="a")
    root.create_array("data/more", shape=(10, 5, 7), dtype="uint8", chunks=(4, 2, 3), **options)
    with pytest.raises(rl.SchemaError, match=f"s.zarr: data/more: .*{words}"):
        from_zarr(tmp_path / "s.zarr")


def test_the_zarr_library_reads_a_written_store(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr", minversion="3", reason="needs zarr 3")
    replay = make_rich_replay()
    to_zarr(replay, tmp_path / "s.zarr")
    root = zarr.open_group(tmp_path / "s.zarr", mode="r")
    assert root["meta/episode_ends"][:].tolist() == [3, 4, 9, 13]
    rows = replay[replay.ids()]
    assert np.array_equal(root["data/camera"][:], rows["obs", "camera"].numpy())
    assert np.array_equal(root["data/info_force"][:], rows["info", "force"].numpy())


def test_the_error_for_another_layout_names_the_contents(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(rl.SchemaError, match="empty: expected arrays in 'data', and 'meta/episode_ends', got an empty"):
        from_zarr(tmp_path / "empty")
    with pytest.raises(rl.SchemaError, match="none: expected a folder or a .zip with a zarr store"):
        from_zarr(tmp_path / "none")
