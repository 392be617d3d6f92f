"""T5, T6: n-step windows."""

from __future__ import annotations

from relive_conformance.adapters.off_policy import NotOffered
from relive_conformance.adapters.protocol import Adapter
from relive_conformance.case import Case
from relive_conformance.cases.rows import GAMMA, match_windows
from relive_conformance.outcome import expect
from relive_conformance.probe import Probe, require
from relive_conformance.scenario import Script, play

NO_WINDOWS = "n-step transitions"
SCRIPTS: dict[str, list[Script]] = {
    "an end on the first step": [[(1, "terminated"), (9, "open")]],
    "an end inside": [[(3, "terminated"), (8, "open")]],
    "a truncation inside": [[(3, "truncated"), (8, "open")]],
    "an end on the last step": [[(8, "terminated")]],
    "two environments out of phase": [
        [(2, "terminated"), (5, "truncated"), (5, "open")],
        [(4, "truncated"), (3, "terminated"), (5, "open")],
    ],
}


def check_windows(adapter: Adapter) -> None:
    make, probe = require(adapter.n_step_plain or adapter.n_step, NO_WINDOWS), None
    for n in (2, 3, 4, 5, 1):
        for name, scripts in SCRIPTS.items():
            scenario = play(*scripts)
            # The second ring is shorter than the scenario, to make windows reach its head.
            for capacity in (20, 9):
                try:
                    probe = Probe(make(scenario.shape(capacity), n, GAMMA))
                except NotOffered:
                    if len(scripts) == 1:
                        raise
                    continue
                probe.add_all(scenario.steps())
                if probe.stored:
                    match_windows(probe, scenario, n)
                else:
                    expect(n > 1, f"one-step transitions after {name}", "no transitions")
    if probe is not None and (reason := probe.promise("flags_of_first_step")):
        raise NotOffered(reason)


def check_shortened_windows(adapter: Adapter) -> None:
    make = require(adapter.n_step_plain or adapter.n_step, NO_WINDOWS)
    n, scenario = 4, play([(6, "terminated"), (6, "truncated"), (6, "open")])
    probe = Probe(make(scenario.shape(40), n, GAMMA)).add_all(scenario.steps())
    drawn_times = match_windows(probe, scenario, n)
    missing = sorted(set(range(12)) - drawn_times)
    expect(not missing, "every step of a finished episode to be drawn", f"steps {missing} never")


CASES = (
    Case(
        "T5",
        "n-step windows",
        "n-step transitions, n = 1 … 5: ends on the first step, inside, last; a truncation inside; at the ring's head; "
        "two environments out of phase.",
        "rewards are summed up to the end; flag and next observation are those of the last step of the window",
        check_windows,
    ),
    Case(
        "T6",
        "shortened n-step windows",
        "Shortened n-step windows at the end of an episode.",
        "the discount is γ^k of the k steps taken, and the last n − 1 rows of an episode are drawn, too",
        check_shortened_windows,
    ),
)
