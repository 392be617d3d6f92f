"""The words of a report, which its text, its page and a notebook share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from relive.inspector.remarks import number, percent

FACTS = {
    "kind": "kind",
    "id": "dataset",
    "path": "path",
    "saved": "saved",
    "rows": "rows",
    "capacity": "capacity",
    "num_steps": "maximum steps",
    "num_stored": "steps",
    "reset_rows": "rows that only reset",
    "num_envs": "environments",
    "episodes": "episodes",
    "round": "round",
    "written": "written",
    "oldest": "oldest",
    "bytes": "memory",
    "device": "device",
    "autoreset": "autoreset",
    "next_obs": "next_obs",
    "sampler": "sampler",
}


def facts_told(source: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (title, text) for each fact that needs no reading of rows."""
    several = (source.get("num_envs") or 1) > 1
    for name, title in FACTS.items():
        value = source.get(name)
        if value is None:
            continue
        if name == "bytes":
            text = size_text(value)
        elif name == "oldest":
            text = f"{value:,} rows ago" + (", counted in its own environment" if several else "")
        elif name == "written":
            text = f"{value:,} rows so far" + (
                f", in all {source['num_envs']:,} environments together" if several else ""
            )
        else:
            text = f"{value:,}" if isinstance(value, int) else str(value)
        yield title, text


def size_text(nbytes: float) -> str:
    """A number of bytes with a unit that leaves few digits: `7.1 KiB`."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:,.0f} {unit}" if unit == "B" else f"{nbytes:,.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.2f} GiB"


def spread_told(moments: dict[str, Any]) -> str:
    """The range, mean and median of a quantity."""
    words = f"{number(moments['min'])} to {number(moments['max'])}, mean {number(moments['mean'])}"
    return f"{words}, median {number(moments['median'])}"


def share_told(count: int, of: int) -> str:
    """A count and its share: `3 (12 %)`."""
    return f"{count:,} ({percent(count / (of or 1))})"


def ends_told(ends: dict[str, int], stopped: int) -> dict[str, str]:
    """The number of episodes that stopped in each way, and their share of all stopped episodes."""
    known = {name: count for name, count in ends.items() if count}
    return {name: f"{count:,}" if name == "running" else share_told(count, stopped) for name, count in known.items()}


def ends_text(ends: dict[str, int], stopped: int) -> str:
    """The text of `ends_told` in one line."""
    return ", ".join(f"{name} {text}" for name, text in ends_told(ends, stopped).items())


def episodes_told(episodes: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (title, text) for the number of stored episodes, their returns, lengths and ends."""
    yield "stored", f"{episodes['count']:,}, {episodes['whole']:,} of them whole"
    if episodes["returns"] is not None:
        yield "returns", spread_told(episodes["returns"])
        yield "lengths", spread_told(episodes["lengths"])
    yield "ends", ends_text(episodes["ends"], episodes["stopped"])


def form_told(field: dict[str, Any]) -> str:
    """The dtype and shape of a field: `float32[3]`."""
    return f"{field['dtype']}{field['shape'] or ''}"


def reuse_told(reuse: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (title, text) for how often rows were drawn, or that it was not counted."""
    if "draws" in reuse:
        each = "" if reuse["per_row"] is None else f", {number(round(reuse['per_row'], 2))} per row written"
        yield "drawn in total", f"{reuse['draws']:,} rows{each}"
    if "left_in_epoch" in reuse:
        yield "this epoch", f"{reuse['left_in_epoch']:,} rows left"
    counted = reuse.get("counted")
    if counted is None:
        yield "each row", "not counted; sampler=rl.Counted(…) counts the draws of every row"
    else:
        never = percent(counted["never"] / counted["rows"])
        yield (
            "each row",
            f"{number(round(counted['mean'], 2))} times on average, {counted['max']:,} at most, {never} never",
        )
