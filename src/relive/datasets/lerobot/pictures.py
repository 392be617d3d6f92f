"""Images and frames of videos as arrays [height, width, channels] of uint8."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from relive.datasets.installed import required
from relive.datasets.metadata import damage_named, wrong
from relive.errors import SchemaError, explain

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def image(where: str, body: bytes | None, shape: tuple[int, ...]) -> np.ndarray:
    """The pixels of a PNG or JPEG; its size is compared with `shape` before it is decoded."""
    pillow = required("PIL.Image", "lerobot", "Pillow")
    if body is None:  # LeRobot would open the path beside it
        raise wrong(where, "the bytes of an image", "a path to a file outside")
    with (
        damage_named(where, "a PNG or JPEG"),
        pillow.open(io.BytesIO(body), formats=("PNG", "JPEG")) as picture,
    ):
        found = (picture.height, picture.width, picture.mode)
        if found != (*shape[:2], _MODES.get(shape[2])):
            raise wrong(where, f"an image of {shape} pixels and channels", found)
        return np.asarray(picture).reshape(shape)


class Video:
    """The frames of an .mp4, read in the order of their times."""

    def __init__(self, where: str, path: Path, shape: tuple[int, ...], fps: float) -> None:
        self._where, self._path, self._shape, self._fps = where, path, shape, fps
        self._frames: Iterator[tuple[float, Any]] = iter(())
        self._last: tuple[float, Any] | None = None

    def frame(self, time: float) -> np.ndarray:
        """The frame at a time in seconds; raises if there is none within half of a frame."""
        if self._last is None or time < self._last[0] - 0.5 / self._fps:
            self._frames = self._decoded()
            self._last = next(self._frames, None)
        while self._last is not None and time > self._last[0] + 0.5 / self._fps:
            self._last = next(self._frames, None)
        if self._last is None or time < self._last[0] - 0.5 / self._fps:
            remedy = "Download the dataset again."
            raise SchemaError(explain(self._where, f"a frame at {time:.3f} seconds", "no such frame", remedy))
        return self._last[1].to_ndarray(format="rgb24")

    def _decoded(self) -> Iterator[tuple[float, Any]]:
        av = required("av", "lerobot", "PyAV")
        # Of a file object, as an .mp4 and nothing else, FFmpeg opens no further file.
        with (
            damage_named(self._where, "a video that can be read"),
            self._path.open("rb") as file,
            av.open(file, format="mp4") as container,
        ):
            stream = next(iter(container.streams.video), None)
            found = None if stream is None else (stream.height, stream.width)
            if stream is None or found is None or found != self._shape[:2] or self._shape[2] != 3:
                raise wrong(self._where, f"frames of {self._shape} pixels and channels", found)
            # The bitstream has a size of its own, which the container may not tell; coded sizes are rounded up.
            stream.codec_context.options = {"max_pixels": str((found[0] + 255) * (found[1] + 255))}
            for frame in container.decode(stream):
                if (frame.height, frame.width) != self._shape[:2]:
                    raise wrong(self._where, f"frames of {self._shape[:2]}", (frame.height, frame.width))
                yield float(frame.time or 0.0), frame
