"""The warnings of a report: one sentence for each thing that looks odd."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from relive.replay.chains import Chains

_FEW_EPISODES = 5
"""With fewer episodes, warnings about shares of episodes are left out."""


def remarks(report: dict[str, Any]) -> list[str]:
    """The warnings for a report, the gravest first."""
    return [
        *_nothing(report),
        *_broken_numbers(report["fields"]),
        *_chains(Chains(**report["chains"])),
        *_constants(report["fields"], report["read"]),
        *_endings(report["episodes"] or {}),
        *_rewards(report["reward"]),
        *_actions(report["fields"]),
        *_values(report["fit"]),
        *_favourites(report["priorities"]),
        *_reused(report["reuse"] or {}),
    ]


def percent(share: float) -> str:
    """A share in percent; only 0 and 1 are shown as 0 % and 100 %."""
    text = f"{share:.0%}" if 0.01 <= share <= 0.99 or share in (0, 1) else f"{share:.1%}"
    if text == "100.0%" and share < 1:
        return "more than 99.9 %"
    if text == "0.0%" and share > 0:
        return "less than 0.1 %"
    return f"{text[:-1]} %"


def number(value: float | None) -> str:
    """A number with few digits, and a dash for None."""
    if value is None:
        return "–"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}"


def _nothing(report: dict[str, Any]) -> Iterator[str]:
    if not report["source"]["rows"]:
        rewarded = any(field["name"].partition(".")[0] == "reward" for field in report["fields"])
        yield f"{report['source']['kind']} is empty: it holds no {'transitions' if rewarded else 'rows'}."


def _parts(field: dict[str, Any]) -> list[dict[str, Any]]:
    return field["dimensions"] or [field]


def _listed(names: list[str], most: int = 4) -> str:
    rest = len(names) - most
    if rest > 1:
        return f"{', '.join(names[:most])} and {rest:,} more"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def _broken_numbers(fields: list[dict[str, Any]]) -> Iterator[str]:
    for field in fields:
        for part in _parts(field):
            for kind, word in (("nan", "NaN"), ("infinite", "infinite")):
                if part[kind]:
                    many = part[kind] > 1
                    yield f"{part['name']}: {part[kind]:,} number{'s are' if many else ' is'} {word}."


def _constants(fields: list[dict[str, Any]], read: dict[str, int]) -> Iterator[str]:
    rows = f"all {read['of']:,} rows" if read["rows"] == read["of"] else f"the {read['rows']:,} rows that were read"
    for field in fields:
        if field["name"].partition(".")[0] in ("reward", "terminated", "truncated", "round") or not field["constant"]:
            continue  # has a warning of its own, or needs none
        size = math.prod(field["shape"])
        still = [part["name"] for part in field["dimensions"] if part["constant"]] or [field["name"]]
        if field["constant"] == size:
            value = f" it is {number(field['min'])} in {rows}." if field["min"] == field["max"] else f" in {rows}."
            yield f"{field['name']} never changes" + (":" if field["min"] == field["max"] else "") + value
        elif not field["dimensions"]:
            yield f"{field['constant']:,} of the {size:,} numbers of {field['name']} never change in {rows}."
        elif len(still) == 1:
            only = next(part for part in field["dimensions"] if part["constant"])
            yield f"{only['name']} never changes: it is {number(only['min'])} in {rows}."
        else:
            yield f"{_listed(still)} never change in {rows}."


def _chains(chains: Chains) -> Iterator[str]:
    doubts = dict(chains.doubts())
    if "cuts" in doubts:
        yield (
            f"{chains.cut:,} of {chains.followed:,} steps do not start where the step before led, and cut their "
            'episodes. Are observations normalised between the steps, or rows in no order (next_obs="stored")?'
        )
    if "resets" in doubts:
        yield (
            f"All {chains.ended:,} ends lead to the observation that the next episode starts with. Was the observation "
            'after the reset passed as next_obs, in place of info["final_obs"]?'
        )


def _endings(episodes: dict[str, Any]) -> Iterator[str]:
    if "count" not in episodes:
        return
    ends, stopped = episodes["ends"], episodes["stopped"]
    if stopped >= _FEW_EPISODES and ends["truncated"] >= 0.9 * stopped:
        yield f"{percent(ends['truncated'] / stopped)} of episodes end by time limit."
    if not ends["terminated"] + ends["truncated"] and episodes["count"]:
        yield "No episode ends: neither terminated nor truncated is ever set."
    if stopped >= _FEW_EPISODES and ends["cut"] >= 0.1 * stopped:
        yield (
            f"{percent(ends['cut'] / stopped)} of episodes stop without an end: the next step did not start "
            "where the last one led. Are observations changed between steps?"
        )
    if episodes["both_flags"]:
        yield f"{_rows(episodes['both_flags'])} both terminated and truncated; they count as terminated."
    lengths = (episodes["lengths"] or {}).get("histogram") or {}
    single = dict(zip(lengths.get("values", ()), lengths["counts"], strict=False)).get(1.0, 0) if lengths else 0
    if episodes["whole"] >= _FEW_EPISODES and single >= 0.1 * episodes["whole"]:
        yield f"{percent(single / episodes['whole'])} of episodes are one step long. Are resets stored as steps?"


def _rows(count: int) -> str:
    return "1 row is" if count == 1 else f"{count:,} rows are"


def _rewards(reward: dict[str, Any] | None) -> Iterator[str]:
    if reward is None or reward["rows"] < 2:
        return
    if reward["constant"] is not None:
        yield f"The reward is {number(reward['constant'])} in every row."
    elif reward["zero"] >= 0.95 * reward["rows"]:
        yield f"The reward is 0 in {percent(reward['zero'] / reward['rows'])} of rows."


def _actions(fields: list[dict[str, Any]]) -> Iterator[str]:
    for part in (part for field in fields if field["name"].partition(".")[0] == "action" for part in _parts(field)):
        bars = part["histogram"]
        if bars is None or "values" not in bars or part["constant"]:
            continue
        total, most = sum(bars["counts"]), max(bars["counts"])
        if most >= 0.95 * total and total >= 20:
            value = bars["values"][bars["counts"].index(most)]
            yield f"{part['name']} is {number(value)} in {percent(most / total)} of rows."
    for field in fields:
        if field["name"].partition(".")[0] == "action" and not field["discrete"]:
            yield from _saturated(field)


def _saturated(field: dict[str, Any]) -> Iterator[str]:
    for part in _parts(field):
        bars = part["histogram"]
        if bars is None or "edges" not in bars:
            continue
        total = sum(bars["counts"])
        outer = (bars["counts"][0] + bars["counts"][-1]) / total
        if outer >= 0.5:
            low, high = number(part["min"]), number(part["max"])
            yield f"{part['name']} is at its extremes ({low} and {high}) in {percent(outer)} of rows."


def _values(fit: float | None) -> Iterator[str]:
    if fit is not None and fit <= 0:
        yield f"The values explain none of the variance of the returns (explained variance {number(fit)})."


def _favourites(priorities: dict[str, Any] | None) -> Iterator[str]:
    if priorities is None or priorities["rows"] < 20:
        return
    if priorities["effective"] is None:
        yield "Every priority is 0: nothing can be drawn."
        return
    few, rows = priorities["rows_with"]["60%"], priorities["rows"]
    if few <= 0.05 * rows:
        yield f"{few:,} row{'s hold' if few > 1 else ' holds'} 60 % of the priority mass."
    elif priorities["effective"] <= 0.1 * rows:
        yield f"The effective sample of the priorities is {number(round(priorities['effective']))} of {rows:,} rows."
    if priorities["zero"] >= 0.5 * rows:
        yield f"{percent(priorities['zero'] / rows)} of rows have priority 0 and are never drawn."


def _reused(reuse: dict[str, Any]) -> Iterator[str]:
    counted = reuse.get("counted")
    if counted is None or not counted["max"]:
        return
    if counted["never"] >= 0.5 * counted["rows"]:
        yield f"{percent(counted['never'] / counted['rows'])} of rows were never drawn."
