"""Progress bar, shown after two seconds if rich is installed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from typing import Any

_DELAY_SECONDS = 2.0
"""Seconds before a bar appears."""


def show_progress(
    parts: Iterable[Any], total: int, label: str, count_steps: Callable[[Any], int] | None = None
) -> Iterator[Any]:
    """Yield `parts`. After two seconds a terminal shows how many of `total` bytes are done.

    If `count_steps` is passed, `total` is a number of steps, and it returns the number of steps of one of `parts`.
    """
    start, done, bar = time.monotonic(), 0, None
    try:
        for part in parts:
            yield part
            done += len(part) if count_steps is None else count_steps(part)
            if bar is None and time.monotonic() - start > _DELAY_SECONDS and sys.stderr.isatty() and find_spec("rich"):
                bar = _start_progress_bar(label, total, are_bytes=count_steps is None)
            if bar is not None:
                bar[0].update(bar[1], completed=done)
    finally:
        if bar is not None:
            bar[0].stop()


def _start_progress_bar(label: str, total: int, *, are_bytes: bool) -> Any:
    from rich import progress as rich_progress  # noqa: PLC0415 (imported only when a bar appears)
    from rich.console import Console  # noqa: PLC0415

    counts = (
        (rich_progress.DownloadColumn(), rich_progress.TransferSpeedColumn())
        if are_bytes
        else (rich_progress.MofNCompleteColumn(),)
    )
    columns = (rich_progress.TextColumn(label), rich_progress.BarColumn(), *counts, rich_progress.TimeRemainingColumn())
    progress = rich_progress.Progress(*columns, console=Console(stderr=True), transient=True)
    progress.start()
    return progress, progress.add_task(label, total=total)
