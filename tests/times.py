"""Seconds of a test run per folder, and its slowest tests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

SLOWEST = 10
NOTABLE = 10.0
"""Shorter runs print no table, in seconds."""


class Times:
    """Seconds per test: set-up, call and tear-down."""

    def __init__(self) -> None:
        self._tests: defaultdict[str, float] = defaultdict(float)

    def add(self, test: str, seconds: float) -> None:
        """Add seconds to a test with the node id `tests/folder/test_file.py::test_name[case]`."""
        self._tests[test] += seconds

    def lines(self) -> Iterator[str]:
        """Yield a line per folder, slowest first, and a line for each of the slowest tests."""
        if sum(self._tests.values()) < NOTABLE:
            return
        folders: defaultdict[str, list[float]] = defaultdict(list)
        for test, seconds in self._tests.items():
            folders[test.partition("::")[0].rpartition("/")[0]].append(seconds)
        for folder, spent in sorted(folders.items(), key=lambda item: -sum(item[1])):
            yield f"{sum(spent):7.1f} s  {len(spent):5} tests  {folder}"
        yield "the slowest tests:"
        for test in sorted(self._tests, key=lambda test: -self._tests[test])[:SLOWEST]:
            yield f"{self._tests[test]:7.1f} s  {test}"
