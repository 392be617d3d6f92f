"""Seconds of a test run per folder, and its slowest tests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

SLOWEST = 10
NOTABLE = 10.0
"""Seconds below which a run needs no table."""


class Times:
    """Seconds of every test: its fixtures, itself, and what is taken down after it."""

    def __init__(self) -> None:
        self._tests: defaultdict[str, float] = defaultdict(float)

    def add(self, test: str, seconds: float) -> None:
        """Count seconds for a test, named as pytest names it: `tests/folder/test_file.py::test_name[case]`."""
        self._tests[test] += seconds

    def lines(self) -> Iterator[str]:
        """A row for every folder, the slowest first, and a row for each of the slowest tests."""
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
