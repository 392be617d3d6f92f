"""The report: every figure is compared with one computed by hand."""

from __future__ import annotations

import doctest
import json
import math
import re
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import relive as rl
from relive.compat import apexrl
from relive.inspector import measures, report
from relive.inspector.measures import compute_histogram
from relive.inspector.text import format_number, format_percent, format_size

NAN = float("nan")


def play(replay: Any, rewards: list[float], end: str = "", start: float = 0.0) -> None:
    """Add an episode whose observation at step t is (start + t, 0.5)."""
    for t, reward in enumerate(rewards):
        last = t == len(rewards) - 1
        flags = last and end == "terminated", last and end == "truncated"
        replay.add([start + t, 0.5], t % 2, reward, *flags, next_obs=[start + t + 1, 0.5])


def four_episodes(**options: Any) -> rl.ReplayBuffer:
    """Return a buffer of four episodes with the returns 6 (terminated), 5 (truncated), 7 (cut) and 1 (running)."""
    replay = rl.ReplayBuffer(100, obs=2, action=rl.Field((), torch.int64), seed=0, **options)
    play(replay, [1, 2, 3], "terminated")
    play(replay, [0, 0, 0, 5], "truncated", start=10)
    play(replay, [7], start=20)
    replay.cut()
    play(replay, [0, 1], start=30)
    return replay


def test_episodes_returns_lengths_and_ends() -> None:
    actual = rl.inspect(four_episodes()).as_dict()
    episodes = actual["episodes"]
    assert (episodes["count"], episodes["whole"]) == (4, 2)
    assert episodes["ends"] == {"terminated": 1, "truncated": 1, "cut": 1, "running": 1}
    assert {name: episodes["returns"][name] for name in ("min", "mean", "median", "max")} == {
        "min": 5, "mean": 5.5, "median": 5.5, "max": 6,
    }  # fmt: skip
    assert episodes["lengths"]["histogram"] == {"values": [3, 4], "counts": [1, 1]}
    assert episodes["curve"]["mean"] == [6, 5], "in the order they ended"
    assert actual["reward"]["zero"] == 4
    assert actual["reward"]["rows"] == actual["source"]["rows"] == 10


def test_episodes_are_ordered_by_time_if_one_environment_ends_often() -> None:
    replay = rl.ReplayBuffer(100, obs=1, action=(), num_envs=2)
    for t in range(20):
        obs = np.array([[t], [100 + t]], np.float32)
        replay.add(obs, np.zeros(2), [1, 10], [t >= 6, t == 5], [False, False], obs + 1)
    episodes = rl.inspect(replay).as_dict()["episodes"]
    curve = [60, 7, *[1] * 13]
    assert episodes["curve"]["mean"] == curve, "the second ended first; then the first ended at every step"
    assert episodes["ends"] == {"terminated": 15, "truncated": 0, "cut": 0, "running": 1}


def test_an_episode_without_its_start_has_no_return() -> None:
    replay = rl.ReplayBuffer(4, obs=2, action=rl.Field((), torch.int64))
    play(replay, [1, 1, 1, 1, 1, 1], "terminated")
    actual = rl.inspect(replay).as_dict()
    assert (actual["episodes"]["count"], actual["episodes"]["whole"]) == (1, 0)
    assert actual["episodes"]["returns"] is None
    assert actual["source"]["written"] == 7, "six steps and the observation that they ended with"


def test_every_field_has_its_numbers() -> None:
    replay = rl.ReplayBuffer(100, obs=3, action=1, extra={"on": rl.Field((), torch.bool)}, seed=0)
    rows = [[1, 5, NAN], [2, 5, 7], [6, 5, math.inf], [3, 5, 8]]
    for t, row in enumerate(rows):
        replay.add(row, [t * 0.5], 1.0, False, False, next_obs=[9, 9, 9], on=t == 0)
    fields = {field["name"]: field for field in rl.inspect(replay).as_dict()["fields"]}
    assert list(fields) == ["obs", "action", "reward", "terminated", "truncated", "on"]
    first, second, third = fields["obs"]["dimensions"]
    assert [first[name] for name in ("min", "mean", "max")] == [1, 3, 6]
    assert first["std"] == pytest.approx(math.sqrt((4 + 1 + 9 + 0) / 4))
    assert [second["constant"], first["constant"], third["constant"]] == [True, False, False]
    assert [third[name] for name in ("min", "mean", "max", "nan", "infinite")] == [7, 7.5, 8, 1, 1]
    whole = fields["obs"]
    assert (whole["min"], whole["max"], whole["nan"], whole["constant"]) == (1, 8, 1, 1)
    assert whole["mean"] == pytest.approx((12 + 20 + 15) / 10)
    spread = np.array([1, 2, 6, 3, 5, 5, 5, 5, 7, 8])
    assert whole["std"] == pytest.approx(spread.std())
    assert fields["on"]["mean"] == 0.25
    assert fields["on"]["histogram"] == {"values": [0, 1], "counts": [3, 1]}


def test_spread_keeps_its_digits_far_from_zero() -> None:
    replay = rl.ReplayBuffer(100, obs=rl.Field((), torch.float64), action=())
    for t in range(50):
        replay.add(1e9 + t % 2, 0.0, 0.0, False, False, next_obs=0.0)
    assert rl.inspect(replay).as_dict()["fields"][0]["std"] == pytest.approx(0.5, rel=1e-12)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], None),
        ([NAN, math.inf], None),
        ([2, 2, 4], {"values": [2, 3, 4], "counts": [2, 0, 1]}),
        ([0.5, 0.25, 0.5], {"values": [0.25, 0.5], "counts": [1, 2]}),
        ([1e308, -1e308, *range(100)], None),
        ([1, 1e-300], {"values": [1e-300, 1], "counts": [1, 1]}),
    ],
)
def test_histograms_of_odd_values(values: list[float], expected: Any) -> None:
    assert compute_histogram(np.array(values, float)) == expected


def test_histograms_of_many_values_count_each_once() -> None:
    values = np.random.default_rng(0).normal(size=1000)
    actual = compute_histogram(values)
    assert actual is not None
    assert sum(actual["counts"]) == 1000
    assert (actual["edges"][0], actual["edges"][-1]) == (values.min(), values.max())
    inside = ((values >= actual["edges"][3]) & (values < actual["edges"][4])).sum()
    assert actual["counts"][3] == inside


def test_priorities_and_the_effective_sample() -> None:
    replay = rl.ReplayBuffer(100, obs=1, action=(), sampler=rl.Prioritized(alpha=1.0, eps=0.0), seed=0)
    for t in range(5):
        replay.add([t], 0.0, 0.0, False, False, next_obs=[t + 1])
    replay.update_priority(replay.ids(), torch.tensor([6.0, 1, 1, 2, 0]))
    for _ in range(4):
        replay.sample(5)
    actual = rl.inspect(replay).as_dict()
    priorities = actual["priorities"]
    assert priorities["effective"] == pytest.approx(100 / (36 + 1 + 1 + 4))
    assert priorities["rows_with"] == {"10%": 1, "30%": 1, "60%": 1, "90%": 3}
    assert (priorities["largest"], priorities["zero"], priorities["rows"]) == (0.6, 1, 5)
    assert priorities["cumulative"] == pytest.approx([0.6, 0.8, 0.9, 1.0, 1.0])
    # 20 rows were drawn and 5 rows written; the number of draws of each row is not counted.
    assert actual["reuse"] == {"draws": 20, "per_row": 4.0}


def test_counted_samplers_report_the_draws_of_each_row() -> None:
    replay = four_episodes(sampler=rl.Counted(rl.WithoutReplacement()))
    replay.sample(10)
    replay.sample(4)
    actual = rl.inspect(replay)
    counted = actual.as_dict()["reuse"]["counted"]
    assert (counted["mean"], counted["max"], counted["never"]) == (1.4, 2, 0)
    assert counted["histogram"] == {"values": [1, 2], "counts": [6, 4]}
    assert actual.as_dict()["reuse"]["left_in_epoch"] == 6
    assert "1.4 times on average, 2 at most, 0 % never" in str(actual)
    assert "not counted; sampler=rl.Counted(…) counts" in str(rl.inspect(four_episodes()))


def test_a_rollout_has_its_advantages_and_no_reset_rows() -> None:
    rollout = rl.RolloutBuffer(4, 2, obs=1, action=(), autoreset="NEXT_STEP")
    for t in range(4):
        # The first environment ends at step 1, so that its step 2 only resets.
        ended = np.array([t == 1, False])
        rollout.add(np.full((2, 1), t), np.zeros(2), np.ones(2), ended, np.zeros(2, bool), value=np.zeros(2))
    rollout.compute_advantage(np.zeros(2), gamma=1.0, lam=1.0)
    actual = rl.inspect(rollout).as_dict()
    assert (actual["source"]["rows"], actual["source"]["reset_rows"]) == (7, 1)
    assert actual["episodes"]["ends"] == {"terminated": 1, "truncated": 0, "cut": 0, "running": 2}
    assert actual["episodes"]["returns"]["mean"] == 2
    fields = {field["name"]: field for field in actual["fields"]}
    # The advantages are 2, 1 and 1 in the first environment, and 4, 3, 2 and 1 in the second.
    assert fields["advantage"]["mean"] == pytest.approx(14 / 7)
    assert fields["advantage"]["histogram"]["values"] == [1, 2, 3, 4]
    assert fields["advantage"]["histogram"]["counts"] == [3, 2, 1, 1]
    assert actual["fit"] == 0, "values that are all 0 explain nothing"
    assert actual["reuse"] is None


def test_a_rollout_that_continues_an_episode_lacks_its_start() -> None:
    rollout = rl.RolloutBuffer(2, None, obs=1, action=())
    for _ in range(2):
        rollout.clear()
        for t in range(2):
            rollout.add([t], 0.0, 1.0, False, False)
    rollout.clear()
    rollout.add([0], 0.0, 1.0, True, False)
    rollout.add([0], 0.0, 1.0, True, False)
    episodes = rl.inspect(rollout).as_dict()["episodes"]
    assert (episodes["count"], episodes["whole"]) == (2, 1)


def test_a_distillation_buffer_has_fields_and_rounds() -> None:
    buffer = rl.DistillationBuffer(3, obs=1)
    buffer.add([[1.0], [2.0]], [[0.0], [1.0]])
    buffer.next_round()
    buffer.add([[3.0], [4.0]], [[0.0], [1.0]])
    actual = rl.inspect(buffer).as_dict()
    fields = {field["name"]: field for field in actual["fields"]}
    assert (fields["obs"]["min"], fields["obs"]["max"]) == (2, 4)
    assert fields["round"]["histogram"] == {"values": [0, 1], "counts": [1, 2]}
    assert (actual["source"]["written"], actual["episodes"], actual["reward"]) == (4, None, None)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: rl.ReplayBuffer(9, obs=1, action=()), "transitions"),
        (lambda: rl.ReplayBuffer(9, obs=1, action=(), sampler=rl.Counted(rl.Prioritized())), "transitions"),
        (lambda: rl.RolloutBuffer(3, 2, obs=1, action=()), "transitions"),
        (lambda: rl.DistillationBuffer(9, obs=1), "rows"),
    ],
)
def test_the_report_of_an_empty_buffer_warns(make: Any, what: str, tmp_path: Path) -> None:
    buffer = make()
    actual = rl.inspect(buffer, html=tmp_path / "page.html")
    assert actual.as_dict()["source"]["rows"] == 0
    assert actual.warnings == [f"{type(buffer).__name__} is empty: it holds no {what}."]
    assert actual.warnings[0] in str(actual)
    assert "rows ago" not in str(actual), "no row is the oldest"


def test_unordered_rows_have_no_episodes() -> None:
    replay = rl.ReplayBuffer(9, obs=1, action=(), next_obs="stored")
    for t in range(5):
        replay.add([t], 0.0, 1.0, t == 4, False, next_obs=[t + 1])
    actual = rl.inspect(replay).as_dict()
    assert actual["episodes"] is None
    assert actual["reward"]["zero"] == 0


def test_rewards_of_several_agents_are_summed() -> None:
    replay = rl.ReplayBuffer(9, obs=1, action=(), reward={"fox": (), "hare": 2})
    replay.add([0], 0.0, {"fox": 1.0, "hare": [10.0, 100.0]}, True, False, next_obs=[1])
    assert rl.inspect(replay).as_dict()["episodes"]["returns"]["mean"] == 111


def test_statistics_include_overwritten_episodes_and_reasons() -> None:
    stats = rl.EpisodeStats(None, reasons=("fall",), metrics=("work",))
    replay = rl.ReplayBuffer(
        4, obs=1, action=(), extra={"fall": rl.Field((), torch.bool), "work": ()}, stats=stats, seed=0
    )
    for t in range(10):
        replay.add([t], 0.0, t, t % 2 == 1, False, next_obs=[t + 1], fall=t in (1, 3), work=2.0)
    actual = rl.inspect(replay)
    contents = actual.as_dict()["episodes"]["stats"]
    assert (contents["episodes"], contents["steps"], contents["reasons"]) == (5, 10, {"fall": 2})
    assert contents["returns"]["mean"] == 9
    assert contents["metrics"]["work"]["mean"] == 4
    assert re.search(r"reason: fall +2 \(40 %\)", str(actual))
    other = rl.EpisodeStats(None)
    other.update(3.0, True, False)
    assert rl.inspect(replay, stats=other).as_dict()["episodes"]["stats"]["returns"]["mean"] == 3


def test_large_buffers_are_read_in_part_and_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "READ_VALUES", 600)
    replay = rl.ReplayBuffer(1000, obs=2, action=rl.Field((), torch.int64), seed=0)
    play(replay, [1.0] * 999, "terminated")
    actual = rl.inspect(replay)
    contents = actual.as_dict()
    assert contents["read"]["of"] == 999
    assert 80 <= contents["read"]["rows"] <= 125
    assert contents["reward"]["rows"] == 999
    assert contents["episodes"]["returns"]["mean"] == 999, "rewards and ends are read of every row"
    assert contents["fields"][0]["dimensions"][0]["max"] > 900, "the stretches go to the end"
    assert f"obs[1] never changes: it is 0.5 in the {contents['read']['rows']} rows that were read." in actual.warnings
    assert f"from {contents['read']['rows']} of 999 rows" in str(actual)


def make_replay(rows: list[dict[str, Any]], **options: Any) -> rl.ReplayBuffer:
    """Return a buffer of consecutive rows, with the fields of `rows`."""
    replay = rl.ReplayBuffer(2 * len(rows), obs=1, action=1, seed=0, **options)
    for t, row in enumerate(rows):
        usual = {"obs": [t], "action": [math.sin(t)], "reward": t % 3, "terminated": False, "truncated": False}
        replay.add(**{**usual, "next_obs": [t + 1], **row})
    return replay


def favourites() -> rl.ReplayBuffer:
    replay = make_replay([{}] * 100, sampler=rl.Prioritized(alpha=1.0, eps=0.0))
    priority = torch.ones(100)
    priority[[3, 5]] = 100.0
    replay.update_priority(replay.ids(), priority)
    return replay


def never_drawn() -> rl.ReplayBuffer:
    replay = make_replay([{}] * 100, sampler=rl.Counted(rl.WithoutReplacement()))
    replay.sample(30)
    return replay


def lines(count: int, make_row: Any) -> Any:
    """Return a function that makes a buffer of the rows `make_row(0)` to `make_row(count - 1)`."""
    return lambda: make_replay([make_row(t) for t in range(count)])


WARNINGS: dict[str, Any] = {
    "obs[1] never changes: it is 0.5 in all 10 rows.": four_episodes,
    "action never changes: it is 2 in all 3 rows.": lines(3, lambda t: {"action": [2.0]}),
    "obs[0]: 1 number is NaN.": lines(3, lambda t: {"obs": [NAN], "next_obs": [2]} if t == 1 else {}),
    "90 % of episodes end by time limit.": lines(50, lambda t: {"truncated": t % 10 != 9, "terminated": t % 10 == 9}),
    "No episode ends: neither terminated nor truncated is ever set.": lines(9, lambda t: {}),
    "44 % of episodes stop without an end": lines(10, lambda t: {"next_obs": [t + 1.5], "terminated": t % 2 == 0}),
    "1 row is both terminated and truncated; they count as terminated.": lines(
        2, lambda t: {"terminated": t == 1, "truncated": t == 1}
    ),
    "50 % of episodes are one step long.": lines(20, lambda t: {"terminated": t % 4 in (0, 3)}),
    "The reward is 0 in every row.": lines(9, lambda t: {"reward": 0.0}),
    "The reward is 0 in 99.8 % of rows.": lines(500, lambda t: {"reward": float(t == 30)}),
    "action[0] is 0 in 99 % of rows.": lines(100, lambda t: {"action": [float(t == 7)]}),
    "action[0] is at its extremes (-1 and 1) in 8": lines(
        100, lambda t: {"action": [max(min(5 * math.sin(t), 1), -1)]}
    ),
    "2 rows hold 60 % of the priority mass.": favourites,
    "70 % of rows were never drawn.": never_drawn,
}
"""For the beginning of each warning, a function that makes a suspicious buffer."""


@pytest.mark.parametrize("sentence", WARNINGS)
def test_suspicious_data_has_a_warning(sentence: str) -> None:
    warnings = rl.inspect(WARNINGS[sentence]()).warnings
    assert any(warning.startswith(sentence) for warning in warnings), warnings


def test_a_running_episode_has_not_stopped_and_is_in_no_share() -> None:
    rows = [{"truncated": t % 10 == 9} for t in range(115)]
    actual = rl.inspect(make_replay(rows))
    assert actual.as_dict()["episodes"]["stopped"] == 11
    assert "100 % of episodes end by time limit." in actual.warnings
    assert "truncated 11 (100 %), running 1\n" in str(actual)


def test_row_counts_name_the_environments_that_they_cover() -> None:
    replay = rl.ReplayBuffer(8, obs=1, action=(), num_envs=2)
    for t in range(6):
        obs = np.full((2, 1), t)
        replay.add(obs, np.zeros(2), np.zeros(2), np.zeros(2, bool), np.zeros(2, bool), obs + 1)
    text = str(rl.inspect(replay))
    assert re.search(r"written +12 rows so far, in all 2 environments together\n", text)
    assert re.search(r"oldest +4 rows ago, counted in its own environment\n", text)
    assert re.search(r"written +10 rows so far\n", str(rl.inspect(make_replay([{}] * 10))))


def test_healthy_data_has_no_warnings() -> None:
    rng = np.random.default_rng(0)
    rows = [
        {
            "terminated": t % 9 == 8,
            "next_obs": [t + 1 + (t % 9 == 8) / 2],
            "action": rng.normal(size=1),
            "reward": rng.normal(),
        }
        for t in range(90)
    ]
    assert rl.inspect(make_replay(rows, sampler=rl.Prioritized())).warnings == []


def test_values_that_explain_nothing_have_a_warning() -> None:
    rollout = rl.RolloutBuffer(8, None, obs=1, action=1)
    for t in range(8):
        rollout.add([t], [t], t % 3, False, False, value=float(t))
    rollout.compute_advantage(0.0)
    assert any(
        "The values explain none of the variance of the returns" in line for line in rl.inspect(rollout).warnings
    )


@pytest.mark.parametrize(
    ("show", "texts"),
    [
        (
            format_percent,
            {0.0: "0 %", 1.0: "100 %", 0.914: "91 %", 0.9999: "more than 99.9 %", 1e-9: "less than 0.1 %"},
        ),
        (format_number, {None: "–", 3.0: "3", 1234567.0: "1,234,567", 0.123456: "0.1235", 1e20: "1e+20"}),
        (format_size, {0: "0 B", 1023: "1,023 B", 1024: "1.0 KiB", 3 << 19: "1.5 MiB", 5 << 30: "5.00 GiB"}),
    ],
)
def test_numbers_are_short_and_shares_do_not_round_to_all_or_nothing(show: Any, texts: dict[Any, str]) -> None:
    assert {value: show(value) for value in texts} == texts


@pytest.mark.filterwarnings("ignore:reward. expected finite numbers")
def test_the_report_is_json_without_numbers_that_are_none(tmp_path: Path) -> None:
    replay = make_replay([{"obs": [NAN], "reward": math.inf, "next_obs": [1]}, {"reward": NAN}, {}])
    actual = rl.inspect(replay)
    assert json.loads(actual.to_json(), parse_constant=pytest.fail) == actual.as_dict()
    assert actual.as_dict()["relive"] == rl.__version__


def test_a_terminal_sees_colours_and_a_text_has_none() -> None:
    actual = rl.inspect(four_episodes())
    console = Console(file=StringIO(), force_terminal=True, width=100)
    console.print(actual)
    assert isinstance(console.file, StringIO)
    assert "\x1b[" in console.file.getvalue()
    assert "\x1b" not in str(actual)
    assert repr(actual) == str(actual)
    assert "terminated 1 (33 %), truncated 1 (33 %), cut 1 (33 %), running 1\n" in str(actual)


@pytest.mark.parametrize("wrap", [lambda sampler: sampler, rl.Counted])
def test_a_saved_buffer_is_inspected_by_its_path(wrap: Any, tmp_path: Path) -> None:
    replay = four_episodes(sampler=wrap(rl.Prioritized(beta=lambda draws: 0.4)))
    replay.save(tmp_path / "run")
    kept = rl.inspect(tmp_path / "run").as_dict()
    now = rl.inspect(replay).as_dict()
    assert kept["source"].pop("path") == str(tmp_path / "run")
    assert kept["source"].pop("saved")
    for contents in (kept, now):
        assert "Prioritized" in contents["source"].pop("sampler"), "a function is not saved, but priorities are"
    assert kept == now


def test_a_compat_buffer_is_inspected_through_its_core() -> None:
    other = apexrl.DistillationBuffer(10, (2,), device="cpu")
    assert rl.inspect(other).as_dict()["source"]["kind"] == "DistillationBuffer"


def test_inspecting_changes_nothing() -> None:
    twin, replay = (four_episodes(sampler=rl.Counted(rl.Prioritized())) for _ in range(2))
    rl.inspect(replay)
    assert bool((replay.sample(6) == twin.sample(6)).all())
    replay.check()


def test_other_objects_and_missing_paths_are_refused() -> None:
    with pytest.raises(rl.SchemaError, match="inspect: expected one of ReplayBuffer, .*, got int"):
        rl.inspect(3)
    with pytest.raises(rl.NoCheckpoint):
        rl.inspect("nowhere/at/all")


def test_the_examples_in_docstrings_are_right() -> None:
    assert doctest.testmod(report).failed == 0
