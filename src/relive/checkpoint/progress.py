"""Progress bar, shown after two seconds where rich is installed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from typing import Any

_PATIENCE = 2.0
"""Seconds before a bar appears."""


def show_progress(
    parts: Iterable[Any], total: int, what: str, steps: Callable[[Any], int] | None = None
) -> Iterator[Any]:
    """Pass parts on; when they take long, a terminal shows how many of `total` bytes, or `steps`, have passed."""
    started, passed, bar = time.monotonic(), 0, None
    try:
        for part in parts:
            yield part
            passed += len(part) if steps is None else steps(part)
            if bar is None and time.monotonic() - started > _PATIENCE and sys.stderr.isatty() and find_spec("rich"):
                bar = _bar(what, total, are_bytes=steps is None)
            if bar is not None:
                bar[0].update(bar[1], completed=passed)
    finally:
        if bar is not None:
            bar[0].stop()


def _bar(what: str, total: int, *, are_bytes: bool) -> Any:
    from rich import progress as shown  # noqa: PLC0415 (only what takes long pays for it)
    from rich.console import Console  # noqa: PLC0415

    counted = (shown.DownloadColumn(), shown.TransferSpeedColumn()) if are_bytes else (shown.MofNCompleteColumn(),)
    columns = (shown.TextColumn(what), shown.BarColumn(), *counted, shown.TimeRemainingColumn())
    progress = shown.Progress(*columns, console=Console(stderr=True), transient=True)
    progress.start()
    return progress, progress.add_task(what, total=total)
