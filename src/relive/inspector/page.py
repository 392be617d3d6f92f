"""The report as one self-contained HTML page, without libraries and network access."""

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

from relive.inspector.measures import Measurements, finite_or_none, format_element_name
from relive.inspector.source import ENDS, ReportSource
from relive.inspector.text import format_ends, format_facts, format_percent, format_share, make_reuse_lines
from relive.schema.conversion import path_name
from relive.schema.fields import Path as FieldPath

_MAX_FRAME_SIDE = 72
"""Maximum pixels of the longer side of a frame; larger frames are scaled down."""
_MAX_CHANNELS = 16
_MIN_PICTURE_SIDE = 8


def is_picture(shape: tuple[int, ...], dtype: str) -> bool:
    """Whether a field of this shape and dtype is shown as an image: bytes with height and width."""
    sides = sorted(shape)[-2:]
    return dtype == "uint8" and 2 <= len(shape) <= 4 and sides[0] >= _MIN_PICTURE_SIDE


def make_frame(row: np.ndarray) -> np.ndarray:
    """Return the image of a row, [H, W] grey or [H, W, 3]; of stacked frames the newest."""
    picture = row[..., -1] if row.ndim == 4 else row
    if picture.ndim == 3:
        if picture.shape[-1] > _MAX_CHANNELS or picture.shape[0] < picture.shape[-1]:
            picture = np.moveaxis(picture, 0, -1)
        picture = picture if picture.shape[-1] == 3 else picture[..., -1]
    factor = -(-max(picture.shape[:2]) // _MAX_FRAME_SIDE)
    if factor == 1:
        return picture
    height, width = (side // factor * factor for side in picture.shape[:2])
    blocks = picture[:height, :width].reshape(height // factor, factor, width // factor, factor, *picture.shape[2:])
    return blocks.mean((1, 3)).round().astype(np.uint8)


def encode_png(picture: np.ndarray) -> bytes:
    """Encode a picture [H, W] or [H, W, 3] of bytes as a PNG file."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = picture.shape[:2]
    color = 2 if picture.ndim == 3 else 0
    # Each line begins with the number of its filter, which stays 0 because no line is filtered.
    lines = np.zeros((height, 1 + picture[0].size), np.uint8)
    lines[:, 1:] = picture.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)
    chunks = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)), chunk(b"IEND", b"")
    return b"".join((b"\x89PNG\r\n\x1a\n", *chunks))


_MAX_EPISODES, _MAX_STEPS_PER_EPISODE, _MAX_STEPS = 48, 1000, 12_000
_MAX_SERIES, _FRAMES_PER_EPISODE, _MAX_FRAME_BYTES = 16, (4, 16), 1 << 20
_SERIES_ORDER = ("reward", "value", "advantage", "return", "action", "obs")
"""The fields that are plotted first, in order."""
_UNORDERED_ROWS = 64


def read_shown_episodes(source: ReportSource, measurements: Measurements) -> dict[str, Any]:
    """Read the episodes that the page shows step by step, as many as fit in a small file."""
    spans = _choose_episode_spans(source, measurements)
    forms = {path: (shape, str(dtype).removeprefix("torch.")) for path, (shape, dtype) in source.columns.items()}
    pictures = [path for path, form in forms.items() if is_picture(*form)]
    rank = {name: i for i, name in enumerate(_SERIES_ORDER)}
    plotted_paths = [path for path in forms if path not in pictures and path[0] not in ("terminated", "truncated")]
    plotted_paths.sort(key=lambda path: rank.get(path[0], len(rank)))
    series = [(path, i) for path in plotted_paths for i in range(math.prod(forms[path][0]))]
    shown_series = series[:_MAX_SERIES]
    nbytes = sum(
        _make_row_frame(source, path, torch.zeros(forms[path][0], dtype=torch.uint8, device="cpu")).size
        for path in pictures
    )
    frames = min(max(_MAX_FRAME_BYTES // max(nbytes * len(spans), 1), _FRAMES_PER_EPISODE[0]), _FRAMES_PER_EPISODE[1])
    num_steps_left, chosen_episodes = _MAX_STEPS, []
    for span in spans:
        first = max(span["start"], span["stop"] - _MAX_STEPS_PER_EPISODE)
        num_steps_left -= span["stop"] - first
        if num_steps_left < 0 and chosen_episodes:
            break
        chosen_episodes.append(_read_episode(source, span, first, shown_series, pictures, frames))
    return {
        "episodes": chosen_episodes,
        "of": 0 if source.episodes is None else len(source.episodes),
        "ordered": source.episodes is not None,
        "series": [format_element_name(path_name(path), forms[path][0], i) for path, i in shown_series],
        "left_out": len(series) - len(shown_series),
    }


def _choose_episode_spans(source: ReportSource, measurements: Measurements) -> list[dict[str, Any]]:
    """Choose episodes to show: newest, best, worst, longest, then evenly spaced; or stretches of unordered rows."""
    episodes = source.episodes
    if episodes is None:
        size = min(_UNORDERED_ROWS, source.length)
        starts = np.unique(np.linspace(0, source.length - size, 8).astype(int)) if size else []
        return [{"number": i, "start": int(at), "stop": int(at) + size} for i, at in enumerate(starts)]
    oldest = np.argsort(episodes.time, kind="stable")
    newest, number = oldest[::-1], np.argsort(oldest)
    best = np.argsort(measurements.returns, kind="stable")
    longest = np.argsort(episodes.start - episodes.stop, kind="stable")
    evenly_spaced = newest[np.linspace(0, len(newest) - 1, _MAX_EPISODES).astype(int)] if len(newest) else newest
    candidates = [*newest[:12], *best[::-1][:6], *best[:6], *longest[:4], *evenly_spaced]
    return [
        {
            "number": int(number[i]),
            "start": int(episodes.start[i]),
            "stop": int(episodes.stop[i]),
            "env": int(episodes.env[i]),
            "began": bool(episodes.has_start[i]),
            "end": ENDS[measurements.ends[i]],
            "return": finite_or_none(measurements.returns[i]),
        }
        for i in list(dict.fromkeys(int(episode) for episode in candidates))[:_MAX_EPISODES]
    ]


def _read_episode(
    source: ReportSource,
    span: dict[str, Any],
    first_row: int,
    series: list[tuple[FieldPath, int]],
    picture_paths: list[FieldPath],
    num_frames: int,
) -> dict[str, Any]:
    start, stop = span["start"], span["stop"]
    leaves = source.read(first_row, stop, list(dict.fromkeys(path for path, _ in series)))
    columns = [leaves[path].reshape(stop - first_row, -1)[:, i] for path, i in series]
    numbers = [(x.abs() if x.is_complex() else x).float().numpy().astype("<f4") for x in columns]
    frame_rows = np.unique(np.linspace(first_row, stop - 1, num_frames).astype(int)).tolist()
    return {
        **{name: value for name, value in span.items() if name not in ("start", "stop")},
        "row": start,
        "length": stop - start,
        "first": first_row - start,
        "series": [base64.b64encode(x.tobytes()).decode() for x in numbers],
        "frames": [_draw_frames(source, path, frame_rows, first_row) for path in picture_paths],
    }


def _draw_frames(source: ReportSource, path: FieldPath, rows: list[int], first_row: int) -> dict[str, Any]:
    """Draw the images of some rows side by side in one PNG."""
    pictures = [_make_row_frame(source, path, source.read(row, row + 1, [path])[path][0]) for row in rows]
    png_text = base64.b64encode(encode_png(np.concatenate(pictures, 1))).decode()
    return {
        "name": path_name(path),
        "at": [row - first_row for row in rows],
        "height": pictures[0].shape[0],
        "width": pictures[0].shape[1],
        "png": f"data:image/png;base64,{png_text}",
    }


def _make_row_frame(source: ReportSource, path: FieldPath, leaf: torch.Tensor) -> np.ndarray:
    axis = source.stacks.get(path)
    return make_frame((leaf if axis is None else leaf.select(axis, -1)).numpy())


def write_page(path: Path, report: dict[str, Any], episodes: dict[str, Any] | None) -> None:
    """Write the page; names and texts from a file are data in it, never markup."""
    assets = files("relive.inspector").joinpath("assets")
    template, style, script = (
        assets.joinpath(name).read_text("utf-8") for name in ("page.html", "page.css", "page.js")
    )
    source = report["source"]
    inspection_time = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    title = " · ".join(filter(None, (source["kind"], source.get("path", source.get("id")), inspection_time)))
    data = {**report, "inspected": inspection_time, "texts": _make_page_texts(report), "browser": episodes}
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    parts = {
        "title": html.escape(title),
        "style": style,
        "script": script,
        "policy": f"default-src 'none'; script-src {_hash_for_policy(script)}; style-src {_hash_for_policy(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'",
        # Special characters are escaped, so that an HTML parser finds no tag or comment in the data.
        "data": re.sub("[<>&\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", text),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template), "utf-8")


def _make_page_texts(report: dict[str, Any]) -> dict[str, Any]:
    """Return the texts that the page shares with the terminal and the warnings."""
    episodes, reward, priorities = report["episodes"] or {}, report["reward"], report["priorities"]
    stats = episodes.get("stats")
    texts: dict[str, Any] = {
        "facts": list(format_facts(report["source"])),
        "reuse": [(line.name, line.text) for line in make_reuse_lines(report["reuse"] or {}) if line.text],
    }
    if "ends" in episodes:
        texts["ends"] = format_ends(episodes["ends"], episodes["stopped"])
    if stats is not None:
        texts["stats_ends"] = format_ends({name: stats[name] for name in ("terminated", "truncated")}, stats["window"])
        texts["reasons"] = [[name, format_share(count, stats["window"])] for name, count in stats["reasons"].items()]
    if reward is not None:
        texts["zero"] = format_percent(reward["zero"] / reward["rows"])
    if priorities is not None and priorities["effective"] is not None:
        texts["effective"] = format_percent(priorities["effective"] / priorities["rows"])
        texts["cumulative"] = [format_percent(min(share, 1.0)) for share in priorities["cumulative"]]
    return texts


def _hash_for_policy(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
