"""A checksum for every few megabytes of a file. Nothing here knows torch."""

from __future__ import annotations

from relive.checkpoint.manifest import File
from relive.errors import CorruptCheckpoint, explain
from relive.kernels import crc32
from relive.storage.codec import CHUNK


class Checksums:
    """One for every `CHUNK` bytes that pass by."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._found: list[int] = []
        self._current = 0

    def count(self, part: memoryview | bytes) -> memoryview:
        """Pass bytes on."""
        rest = whole = memoryview(part).cast("B")
        while len(rest):
            room = CHUNK - self.nbytes % CHUNK
            self._current = crc32(rest[:room], self._current)
            self.nbytes += len(rest[:room])
            rest = rest[room:]
            if self.nbytes % CHUNK == 0:
                self._end()
        return whole

    def _end(self) -> None:
        self._found.append(self._current)
        self._current = 0

    def done(self) -> list[int]:
        """All of them."""
        if self.nbytes % CHUNK:
            self._end()
        return self._found


def require_checksum(name: str, file: File, i: int, length: int, found: int) -> None:
    """The i-th piece of a file is whole, and its bytes are those that were written."""
    expected = file.checksums[i]
    if length != min(CHUNK, file.nbytes - i * CHUNK) or found != expected:
        place = f"{name}, bytes {i * CHUNK} to {i * CHUNK + length}"
        remedy = "Load an older checkpoint, or copy this one again."
        raise CorruptCheckpoint(explain(place, f"the checksum {expected:08x}", f"{found:08x}", remedy))
