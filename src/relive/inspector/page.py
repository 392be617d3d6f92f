"""The report as one self-contained HTML page: no library, no network, and no script but its own."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import struct
import zlib
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relive.inspector.measures import Measurements, percent, place
from relive.inspector.source import ENDS, RowSource
from relive.inspector.text import end_texts, fact_texts, reuse_texts, share_text
from relive.schema.conversion import path_name
from relive.schema.fields import Path as FieldPath

_LARGEST = 72
"""The most pixels of a frame's longer side; larger frames are averaged down."""
_CHANNELS = 16
_SMALLEST = 8


def is_picture(shape: tuple[int, ...], dtype: str) -> bool:
    """Whether a field of this shape and dtype is shown as an image: bytes with height and width."""
    sides = sorted(shape)[-2:]
    return dtype == "uint8" and 2 <= len(shape) <= 4 and sides[0] >= _SMALLEST


def frame(row: np.ndarray) -> np.ndarray:
    """The image of a row, [H, W] grey or [H, W, 3]; of stacked frames the newest."""
    picture = row[..., -1] if row.ndim == 4 else row
    if picture.ndim == 3:
        if picture.shape[-1] > _CHANNELS or picture.shape[0] < picture.shape[-1]:
            picture = np.moveaxis(picture, 0, -1)
        picture = picture if picture.shape[-1] == 3 else picture[..., -1]
    return _smaller(picture)


def _smaller(picture: np.ndarray) -> np.ndarray:
    factor = -(-max(picture.shape[:2]) // _LARGEST)
    if factor == 1:
        return picture
    height, width = (side // factor * factor for side in picture.shape[:2])
    blocks = picture[:height, :width].reshape(height // factor, factor, width // factor, factor, *picture.shape[2:])
    return blocks.mean((1, 3)).round().astype(np.uint8)


def png(picture: np.ndarray) -> bytes:
    """A picture [H, W] or [H, W, 3] of bytes as a PNG file."""
    height, width = picture.shape[:2]
    color = 2 if picture.ndim == 3 else 0
    # Each line begins with the number of its filter; 0 means unfiltered.
    lines = np.zeros((height, 1 + picture[0].size), np.uint8)
    lines[:, 1:] = picture.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


_MOST_EPISODES, _MOST_STEPS, _ALL_STEPS = 48, 1000, 12_000
_MOST_SERIES, _FRAMES, _ALL_FRAME_BYTES = 16, (4, 16), 1 << 20
_FIRST = ("reward", "value", "advantage", "return", "action", "obs")
"""The order of timelines; other fields follow."""
_UNORDERED_ROWS = 64


def choose_episodes(source: RowSource, found: Measurements) -> dict[str, Any]:
    """The episodes that the page shows step by step, as many as fit in a small file, and their total number."""
    spans = _spans(source, found)
    series, left_out = _series(source)
    pictures = [path for path, (shape, dtype) in source.columns.items() if is_picture(shape, _name(dtype))]
    room, chosen = _ALL_STEPS, []
    sizes = [
        _frame_of(source, path, torch.zeros(source.columns[path][0], dtype=torch.uint8, device="cpu")).size
        for path in pictures
    ]
    frames = _ALL_FRAME_BYTES // max(sum(sizes) * len(spans), 1)
    for span in spans:
        first = max(span["start"], span["stop"] - _MOST_STEPS)
        room -= span["stop"] - first
        if room < 0 and chosen:
            break
        chosen.append(_episode(source, span, first, series, pictures, min(max(frames, _FRAMES[0]), _FRAMES[1])))
    return {
        "episodes": chosen,
        "of": 0 if source.episodes is None else len(source.episodes),
        "ordered": source.episodes is not None,
        "series": [place(path_name(path), source.columns[path][0], i) for path, i in series],
        "left_out": left_out,
    }


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _spans(source: RowSource, found: Measurements) -> list[dict[str, Any]]:
    """The episodes to show: the newest, best, worst and longest, then evenly spaced ones; or stretches of rows."""
    episodes = source.episodes
    if episodes is None:
        size = min(_UNORDERED_ROWS, source.length)
        starts = np.unique(np.linspace(0, source.length - size, 8).astype(int)) if size else []
        return [{"number": i, "start": int(at), "stop": int(at) + size} for i, at in enumerate(starts)]
    newest = np.argsort(episodes.time, kind="stable")[::-1]
    number = np.empty(len(newest), np.int64)
    number[newest[::-1]] = np.arange(len(newest))
    best = np.argsort(found.returns, kind="stable")
    longest = np.argsort(episodes.start - episodes.stop, kind="stable")
    even = newest[np.linspace(0, len(newest) - 1, _MOST_EPISODES).astype(int)] if len(newest) else newest
    picks = [*newest[:12], *best[::-1][:6], *best[:6], *longest[:4], *even]
    return [
        {
            "number": int(number[i]),
            "start": int(episodes.start[i]),
            "stop": int(episodes.stop[i]),
            "env": int(episodes.env[i]),
            "began": bool(episodes.began[i]),
            "end": ENDS[found.ends[i]],
            "return": _finite(found.returns[i]),
        }
        for i in list(dict.fromkeys(int(pick) for pick in picks))[:_MOST_EPISODES]
    ]


def _finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


def _series(source: RowSource) -> tuple[list[tuple[FieldPath, int]], int]:
    """The numbers that have a timeline, the most telling first, and how many are left out."""
    rank = {name: i for i, name in enumerate(_FIRST)}
    told_apart = [path for path in source.columns if path[0] not in ("terminated", "truncated")]
    every = [
        (path, i)
        for path in sorted(told_apart, key=lambda path: rank.get(path[0], len(rank)))
        for i in range(math.prod(source.columns[path][0]))
        if not is_picture(source.columns[path][0], _name(source.columns[path][1]))
    ]
    return every[:_MOST_SERIES], len(every) - len(every[:_MOST_SERIES])


def _episode(
    source: RowSource,
    span: dict[str, Any],
    first: int,
    series: list[tuple[FieldPath, int]],
    pictures: list[FieldPath],
    frames: int,
) -> dict[str, Any]:
    stop = span["stop"]
    leaves = source.read(first, stop, list(dict.fromkeys(path for path, _ in series)))
    columns = [leaves[path].reshape(stop - first, -1)[:, i] for path, i in series]
    numbers = [(x.abs() if x.is_complex() else x).float().numpy().astype("<f4") for x in columns]
    shown = np.unique(np.linspace(first, stop - 1, frames).astype(int)).tolist()
    return {
        **{name: value for name, value in span.items() if name not in ("start", "stop")},
        "row": span["start"],
        "length": stop - span["start"],
        "first": first - span["start"],
        "series": [base64.b64encode(x.tobytes()).decode() for x in numbers],
        "frames": [_strip(source, path, shown, first) for path in pictures],
    }


def _strip(source: RowSource, path: FieldPath, rows: list[int], first: int) -> dict[str, Any]:
    pictures = [_frame_of(source, path, source.read(row, row + 1, [path])[path][0]) for row in rows]
    strip = base64.b64encode(png(np.concatenate(pictures, 1))).decode()
    return {
        "name": path_name(path),
        "at": [row - first for row in rows],
        "height": pictures[0].shape[0],
        "width": pictures[0].shape[1],
        "png": f"data:image/png;base64,{strip}",
    }


def _frame_of(source: RowSource, path: FieldPath, leaf: torch.Tensor) -> np.ndarray:
    axis = source.stacks.get(path)
    return frame((leaf if axis is None else leaf.select(axis, -1)).numpy())


def write_page(path: Path, contents: dict[str, Any], episodes: dict[str, Any] | None) -> None:
    """Write the page; names and texts from a file are data in it, never markup."""
    assets = files("relive.inspector").joinpath("assets")
    template, style, script = (
        assets.joinpath(name).read_text("utf-8") for name in ("page.html", "page.css", "page.js")
    )
    source = contents["source"]
    inspected = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    shown = {**contents, "inspected": inspected, "told": _texts(contents), "browser": episodes}
    parts = {
        "title": html.escape(
            " · ".join(filter(None, (source["kind"], source.get("path", source.get("id")), inspected)))
        ),
        "style": style,
        "script": script,
        "policy": f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        "data": _inert(shown),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template), "utf-8")


def _texts(contents: dict[str, Any]) -> dict[str, Any]:
    """The texts that page, terminal and warnings share."""
    episodes, reward, priorities = contents["episodes"] or {}, contents["reward"], contents["priorities"]
    stats = episodes.get("stats")
    told: dict[str, Any] = {
        "facts": list(fact_texts(contents["source"])),
        "reuse": list(reuse_texts(contents["reuse"] or {})),
    }
    if "ends" in episodes:
        told["ends"] = end_texts(episodes["ends"], episodes["stopped"])
    if stats is not None:
        told["stats_ends"] = end_texts({name: stats[name] for name in ("terminated", "truncated")}, stats["window"])
        told["reasons"] = [[name, share_text(count, stats["window"])] for name, count in stats["reasons"].items()]
    if reward is not None:
        told["zero"] = percent(reward["zero"] / reward["rows"])
    if priorities is not None and priorities["effective"] is not None:
        told["effective"] = percent(priorities["effective"] / priorities["rows"])
        told["cumulative"] = [percent(min(share, 1.0)) for share in priorities["cumulative"]]
    return told


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _inert(data: Any) -> str:
    """JSON in which an HTML parser finds no tag and no comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", text)
