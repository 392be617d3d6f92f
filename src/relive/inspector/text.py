"""The texts of a report, which the terminal, the card and the page share: formatted figures, and warnings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from relive.replay.continuity import MIN_ENDS, StepContinuityStats


def format_number(value: float | None) -> str:
    """Format a number with few digits; None as a dash."""
    if value is None:
        return "–"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}"


def format_percent(share: float) -> str:
    """Format a share in percent; only exactly 0 and 1 become 0 % and 100 %."""
    text = f"{share:.0%}" if 0.01 <= share <= 0.99 or share in (0, 1) else f"{share:.1%}"
    if text == "100.0%" and share < 1:
        return "more than 99.9 %"
    if text == "0.0%" and share > 0:
        return "less than 0.1 %"
    return f"{text[:-1]} %"


_FACTS = (
    "kind", "id", "path", "saved", "rows", "capacity", "num_steps", "num_stored", "reset_rows", "num_envs", "episodes",
    "round", "written", "oldest", "bytes", "device", "autoreset", "next_obs", "sampler",
)  # fmt: skip
"""The facts of a source, in the order in which they are shown."""
_FACT_TITLES = {
    "id": "dataset", "num_steps": "maximum steps", "num_stored": "steps", "reset_rows": "rows that only reset",
    "num_envs": "environments", "bytes": "memory",
}  # fmt: skip
"""The titles of the facts whose title differs from their name."""


def format_facts(source: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (title, text) for each fact about the source."""
    has_several_envs = (source.get("num_envs") or 1) > 1
    for name in _FACTS:
        value = source.get(name)
        if value is None:
            continue
        if name == "bytes":
            text = format_size(value)
        elif name == "oldest":
            text = f"{value:,} rows ago" + (", counted in its own environment" if has_several_envs else "")
        elif name == "written":
            text = f"{value:,} rows so far" + (
                f", in all {source['num_envs']:,} environments together" if has_several_envs else ""
            )
        else:
            text = f"{value:,}" if isinstance(value, int) else str(value)
        yield _FACT_TITLES.get(name, name), text


def format_size(nbytes: float) -> str:
    """Format a number of bytes with a suitable unit: `7.1 KiB`."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:,.0f} {unit}" if unit == "B" else f"{nbytes:,.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.2f} GiB"


class ReportLine(NamedTuple):
    """A named quantity of a report."""

    name: str
    text: str = ""
    histogram: dict[str, Any] | None = None
    """A histogram, drawn behind the text where there is space."""
    note: str = ""
    """A text behind the histogram."""


def make_episode_lines(episodes: dict[str, Any]) -> Iterator[ReportLine]:
    """Yield the number of stored episodes, their returns, lengths and ends."""
    yield ReportLine("stored", f"{episodes['count']:,}, {episodes['whole']:,} of them whole")
    for name in ("returns", "lengths"):
        if episodes[name] is not None:
            yield _make_range_line(name, episodes[name])
    yield _make_ends_line(episodes["ends"], episodes["stopped"])


def make_stats_lines(stats: dict[str, Any]) -> Iterator[ReportLine]:
    """Yield the figures of an EpisodeStats."""
    window = stats["window"]
    yield ReportLine("finished", f"{stats['episodes']:,} in {stats['steps']:,} steps, the last {window:,} below")
    for name in ("returns", "lengths"):
        if stats[name] is not None:
            yield _make_range_line(name, stats[name])
    yield _make_ends_line({name: stats[name] for name in ("terminated", "truncated")}, window)
    for name, count in stats["reasons"].items():
        yield ReportLine(f"reason: {name}", format_share(count, window))
    for name, spread in stats["metrics"].items():
        if spread is not None:
            yield _make_range_line(f"metric: {name}", spread)


def make_reward_lines(report: dict[str, Any]) -> Iterator[ReportLine]:
    """Yield the share of rewards that are 0, their values, and how well a rollout's values explain its returns."""
    reward = report["reward"]
    share = format_percent(reward["zero"] / reward["rows"])
    yield ReportLine("zero", f"{reward['zero']:,} of {reward['rows']:,} rows ({share})")
    yield ReportLine("values", "", reward["histogram"])
    if report["fit"] is not None:
        yield ReportLine("explained variance", f"{format_number(report['fit'])} of the returns, by the values")


def make_priority_lines(priorities: dict[str, Any]) -> Iterator[ReportLine]:
    """Yield the effective sample size, and how the mass of the priorities is spread over rows."""
    rows, effective = priorities["rows"], priorities["effective"]
    effective_share, masses = format_percent(effective / rows), priorities["rows_with"].items()
    yield ReportLine("effective sample", f"{format_number(round(effective))} of {rows:,} rows ({effective_share})")
    yield ReportLine("mass", ", ".join(f"{share} in {count:,} rows" for share, count in masses))
    yield ReportLine("largest", f"{format_percent(priorities['largest'])} of the mass")
    yield ReportLine("spectrum", "", priorities["relative"], "relative to the mean, in powers of ten")


def make_reuse_lines(reuse: dict[str, Any]) -> Iterator[ReportLine]:
    """Yield the number of draws, in total and per row."""
    if "draws" in reuse:
        mean = "" if reuse["per_row"] is None else f", {format_number(round(reuse['per_row'], 2))} per row written"
        yield ReportLine("drawn in total", f"{reuse['draws']:,} rows{mean}")
    if "left_in_epoch" in reuse:
        yield ReportLine("this epoch", f"{reuse['left_in_epoch']:,} rows left")
    counted = reuse.get("counted")
    if counted is None:
        yield ReportLine("each row", "not counted; sampler=rl.Counted(…) counts the draws of every row")
        return
    mean, share = format_number(round(counted["mean"], 2)), format_percent(counted["never"] / counted["rows"])
    yield ReportLine("each row", f"{mean} times on average, {counted['max']:,} at most, {share} never")
    yield ReportLine("draws per row", "", counted["histogram"])


def _make_range_line(name: str, spread: dict[str, Any]) -> ReportLine:
    low, high, mean, median = (format_number(spread[figure]) for figure in ("min", "max", "mean", "median"))
    return ReportLine(name, f"{low} to {high}, mean {mean}, median {median}", spread["histogram"])


def _make_ends_line(ends: dict[str, int], num_stopped: int) -> ReportLine:
    return ReportLine("ends", ", ".join(f"{name} {text}" for name, text in format_ends(ends, num_stopped).items()))


def format_ends(ends: dict[str, int], num_stopped: int) -> dict[str, str]:
    """Return the number of episodes that stopped in each way, and their share of all stopped episodes."""
    return {
        name: f"{count:,}" if name == "running" else format_share(count, num_stopped)
        for name, count in ends.items()
        if count
    }


def format_share(count: int, total: int) -> str:
    """Format a count and its share: `3 (12 %)`."""
    return f"{count:,} ({format_percent(count / (total or 1))})"


def format_type(field: dict[str, Any]) -> str:
    """Return the dtype and shape of a field: `float32[3]`."""
    return f"{field['dtype']}{field['shape'] or ''}"


_MAX_NAMES = 4
"""Maximum number of names in a warning."""
_MIN_EPISODES = 5
"""Minimum number of episodes that a percentage in a warning is computed from; with fewer, the warning is left out."""


def find_warnings(report: dict[str, Any]) -> Iterator[str]:
    """Yield the warnings for a report, most serious first."""
    fields, reward, fit = report["fields"], report["reward"], report["fit"]
    counted = (report["reuse"] or {}).get("counted")
    if not report["source"]["rows"]:
        has_reward = any(_is_part_of(field, "reward") for field in fields)
        yield f"{report['source']['kind']} is empty: it holds no {'transitions' if has_reward else 'rows'}."
    for part in (part for field in fields for part in _list_dimensions(field)):
        for kind, word in (("nan", "NaN"), ("infinite", "infinite")):
            if part[kind]:
                yield f"{part['name']}: {part[kind]:,} number{'s are' if part[kind] > 1 else ' is'} {word}."
    yield from _find_continuity_warnings(StepContinuityStats(**report["chains"]))
    yield from _find_constant_warnings(fields, report["read"])
    if "count" in (report["episodes"] or {}):
        yield from _find_end_warnings(report["episodes"])
    if reward is not None and reward["rows"] > 1:
        if reward["constant"] is not None:
            yield f"The reward is {format_number(reward['constant'])} in every row."
        elif reward["zero"] >= 0.95 * reward["rows"]:
            yield f"The reward is 0 in {format_percent(reward['zero'] / reward['rows'])} of rows."
    yield from _find_action_warnings([field for field in fields if _is_part_of(field, "action")])
    if fit is not None and fit <= 0:
        yield f"The values explain none of the variance of the returns (explained variance {format_number(fit)})."
    if report["priorities"] is not None and report["priorities"]["rows"] >= 20:
        yield from _find_priority_warnings(report["priorities"])
    if counted is not None and counted["max"] and counted["never"] >= 0.5 * counted["rows"]:
        yield f"{format_percent(counted['never'] / counted['rows'])} of rows were never drawn."


def _is_part_of(field: dict[str, Any], *names: str) -> bool:
    """Whether a field is one of the fields `names`, or a part of one of them."""
    return field["name"].partition(".")[0] in names


def _list_dimensions(field: dict[str, Any]) -> list[dict[str, Any]]:
    return field["dimensions"] or [field]


def _join_names(names: list[str]) -> str:
    rest = len(names) - _MAX_NAMES
    if rest > 1:
        return f"{', '.join(names[:_MAX_NAMES])} and {rest:,} more"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def _find_constant_warnings(fields: list[dict[str, Any]], read: dict[str, int]) -> Iterator[str]:
    rows = f"all {read['of']:,} rows" if read["rows"] == read["of"] else f"the {read['rows']:,} rows that were read"
    for field in fields:
        # These fields are skipped: the reward has its own warning, and constant flags and rounds are normal.
        if not field["constant"] or _is_part_of(field, "reward", "terminated", "truncated", "round"):
            continue
        name, size = field["name"], math.prod(field["shape"])
        constant_parts = [part for part in field["dimensions"] if part["constant"]]
        if field["constant"] == size:
            value = f": it is {format_number(field['min'])}" if field["min"] == field["max"] else ""
            yield f"{name} never changes{value} in {rows}."
        elif not constant_parts:
            yield f"{field['constant']:,} of the {size:,} numbers of {name} never change in {rows}."
        elif len(constant_parts) == 1:
            value = format_number(constant_parts[0]["min"])
            yield f"{constant_parts[0]['name']} never changes: it is {value} in {rows}."
        else:
            yield f"{_join_names([part['name'] for part in constant_parts])} never change in {rows}."


def _find_continuity_warnings(stats: StepContinuityStats) -> Iterator[str]:
    messages = dict(stats.warnings())
    if "cuts" in messages:
        yield (
            f"{stats.cut:,} of {stats.followed:,} steps do not start where the step before led, and cut their "
            'episodes. Are observations normalised between the steps, or rows in no order (next_obs="stored")?'
        )
    if stats.ended >= MIN_ENDS and 2 * stats.reset > stats.ended:
        ends = f"All {stats.ended:,}" if stats.reset == stats.ended else f"{stats.reset:,} of {stats.ended:,}"
        yield (
            f"{ends} ends lead to the observation that the next episode starts with. Was the observation "
            'after the reset passed as next_obs, in place of info["final_obs"]?'
        )
    elif stats.time_limits >= MIN_ENDS and 2 * stats.time_limits_to_start > stats.time_limits:
        yield (
            f"{stats.time_limits_to_start:,} of {stats.time_limits:,} time limits lead to the observation that the "
            "next episode starts with. That is right only if the environment continues without a reset."
        )


def _find_end_warnings(episodes: dict[str, Any]) -> Iterator[str]:
    ends, num_stopped = episodes["ends"], episodes["stopped"]
    if num_stopped >= _MIN_EPISODES and ends["truncated"] >= 0.9 * num_stopped:
        yield f"{format_percent(ends['truncated'] / num_stopped)} of episodes end by time limit."
    if not ends["terminated"] + ends["truncated"] and episodes["count"]:
        yield "No episode ends: neither terminated nor truncated is ever set."
    if num_stopped >= _MIN_EPISODES and ends["cut"] >= 0.1 * num_stopped:
        yield (
            f"{format_percent(ends['cut'] / num_stopped)} of episodes stop without an end: the next step did not start "
            "where the last one led. Are observations changed between steps?"
        )
    if episodes["both_flags"]:
        rows = "1 row is" if episodes["both_flags"] == 1 else f"{episodes['both_flags']:,} rows are"
        yield f"{rows} both terminated and truncated; they count as terminated."
    lengths = (episodes["lengths"] or {}).get("histogram") or {}
    num_short = dict(zip(lengths.get("values", ()), lengths.get("counts", ()), strict=False)).get(1.0, 0)
    if episodes["whole"] >= _MIN_EPISODES and num_short >= 0.1 * episodes["whole"]:
        share = format_percent(num_short / episodes["whole"])
        yield f"{share} of episodes are one step long. Are resets stored as steps?"


def _find_action_warnings(actions: list[dict[str, Any]]) -> Iterator[str]:
    for field in actions:
        for part in _list_dimensions(field):
            histogram = part["histogram"]
            if histogram is None or part["constant"]:
                continue
            total, max_count = sum(histogram["counts"]), max(histogram["counts"])
            if "values" in histogram and max_count >= 0.95 * total and total >= 20:
                value = histogram["values"][histogram["counts"].index(max_count)]
                yield f"{part['name']} is {format_number(value)} in {format_percent(max_count / total)} of rows."
            outer_share = (histogram["counts"][0] + histogram["counts"][-1]) / total
            if "edges" in histogram and not field["discrete"] and outer_share >= 0.5:
                low, high = format_number(part["min"]), format_number(part["max"])
                yield f"{part['name']} is at its extremes ({low} and {high}) in {format_percent(outer_share)} of rows."


def _find_priority_warnings(priorities: dict[str, Any]) -> Iterator[str]:
    if priorities["effective"] is None:
        yield "Every priority is 0: nothing can be drawn."
        return
    num_top_rows, rows = priorities["rows_with"]["60%"], priorities["rows"]
    if num_top_rows <= 0.05 * rows:
        yield f"{num_top_rows:,} row{'s hold' if num_top_rows > 1 else ' holds'} 60 % of the priority mass."
    elif priorities["effective"] <= 0.1 * rows:
        num_effective_rows = format_number(round(priorities["effective"]))
        yield f"The effective sample of the priorities is {num_effective_rows} of {rows:,} rows."
    if priorities["zero"] >= 0.5 * rows:
        yield f"{format_percent(priorities['zero'] / rows)} of rows have priority 0 and are never drawn."
