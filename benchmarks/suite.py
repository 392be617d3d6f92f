"""Shared parts of all suites: command line, contestants of a case, results."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from rich.console import Console

from relive_conformance.adapters import Adapter, Discovery, NotOffered, discover

from . import machine
from .compare import show_changes
from .report import Line, Result, judge, print_table, write_json
from .timing import FULL, QUICK, Contestant, Effort, Role, race

RESULTS = Path(__file__).parent / "results"
"""The folder of kept results."""

NO_PEERS = Discovery([], [])


class _Case(Protocol):
    """One operation at one size."""

    @property
    def operation(self) -> str: ...

    @property
    def name(self) -> str: ...


C = TypeVar("C", bound=_Case)


class Refused(Exception):
    """Raised if a library's result differs; it is not timed."""


def refuse(reason: str | None) -> None:
    """Raise if a check found a difference."""
    if reason:
        raise Refused(reason)


def get_role(peer: Adapter) -> Role:
    """Return whether a library is ours or a peer."""
    return "ours" if peer.name == "relive" else "peer"


def contestant(peer: Adapter, run: Callable[[], object], **more: Any) -> Contestant:
    """Return an operation of a library to time."""
    return Contestant(peer.name, get_role(peer), run, **more)


def enter(
    case: str, entrants: Iterable[Adapter], make: Callable[[Adapter], Contestant]
) -> tuple[Result, list[Contestant]]:
    """Return the contestants that pass the checks of `make`, and a result with the reasons of the refused ones."""
    result = Result(case, [])
    contestants: list[Contestant] = []
    for peer in entrants:
        try:
            contestants.append(make(peer))
        except NotOffered:
            result.not_offered.append(peer.name)
        except Refused as refusal:
            result.refused[peer.name] = str(refusal)
        # A peer that breaks must not end the run; the report says what it raised.
        except Exception as error:
            result.refused[peer.name] = f"{type(error).__name__}: {error}"
    return result, contestants


@dataclass(frozen=True)
class Session:
    """One run of a suite from the command line."""

    suite: str
    options: argparse.Namespace
    discovery: Discovery
    console: Console
    rng: np.random.Generator
    about: dict[str, Any]
    """Header of a results file."""

    @classmethod
    def start(cls, suite: str, subject: str, operations: Iterable[str], arguments: Sequence[str] | None) -> Session:
        """Read the command line and find the peers."""
        options = make_parser(suite, subject, operations).parse_args(arguments)
        session = cls.create(suite, options, discover())
        for missing in session.discovery.missing:
            session.console.print(f"[yellow]missing[/yellow] {missing.name}: {missing.reason}")
        return session

    @classmethod
    def create(cls, suite: str, options: argparse.Namespace, discovery: Discovery = NO_PEERS) -> Session:
        """Return a session of a suite that finds its peers by itself."""
        about = describe(suite, discovery, options.quick)
        return cls(suite, options, discovery, make_console(), np.random.default_rng(0), about)

    @property
    def effort(self) -> Effort:
        """Effort of each measurement."""
        return QUICK if self.options.quick else FULL

    def time(self, entered: tuple[Result, list[Contestant]], effort: Effort | None = None) -> tuple[Result, list[Line]]:
        """Time the contestants of a case and compare them."""
        result, contestants = entered
        result.timings.extend(race(contestants, effort or self.effort, self.rng))
        return self.compare(result)

    def time_all(
        self,
        cases: Iterable[C],
        enter_case: Callable[[C, Sequence[Adapter]], tuple[Result, list[Contestant]]],
        effort: Effort | None = None,
    ) -> int:
        """Time every case whose operation was chosen, with the contestants of `enter_case`, and finish the run."""
        outcomes = []
        for case in cases:
            if case.operation in self.options.only:
                with self.console.status(case.name):
                    outcomes.append(self.time(enter_case(case, self.discovery.adapters), effort))
        return self.finish(outcomes)

    def compare(self, result: Result) -> tuple[Result, list[Line]]:
        """Compare the contestants of a case after they were timed."""
        return result, judge(result, self.rng)

    def finish(self, outcomes: list[tuple[Result, list[Line]]], **more: Any) -> int:
        """Print the table and write the file; the exit code is 0 even if bars are missed."""
        if outcomes:
            print_table(outcomes, self.console)
        if self.about["machine"]["busy"]:
            self.console.print(
                "[yellow]busy[/yellow]: others used this machine when the run began; its ratios prove nothing"
            )
        path = self.options.json or RESULTS / file_name(self.suite, self.about)
        before = last_kept(self.suite)
        write_json(path, outcomes, {**self.about, **more})
        show_changes(before, json.loads(path.read_text(encoding="utf-8")), self.console)
        self.console.print(f"written to {path}", soft_wrap=True)
        return 0


def make_console() -> Console:
    """Return a console of the terminal's width, or wide enough for tables if the output is a file."""
    console = Console()
    return console if console.is_terminal else Console(width=150)


def make_parser(suite: str, subject: str, operations: Iterable[str] = ()) -> argparse.ArgumentParser:
    """Return the command-line parser of a suite; `--only` selects some of its operations."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{suite}", description=subject)
    parser.add_argument("--quick", action="store_true", help="a few rounds only: for development, not for claims")
    parser.add_argument("--json", type=Path, help=f"where to write the results (default: {RESULTS}/<suite>-<date>)")
    if names := list(operations):
        parser.add_argument("--only", type=names_type(names), default=names, help=f"some of {','.join(names)}")
    return parser


def names_type(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a type of command-line options: some of the names, separated by commas."""
    known = list(names)

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := set(chosen) - set(known):
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {', '.join(sorted(unknown))}")
        return chosen

    return parse


def last_kept(suite: str, folder: Path = RESULTS) -> dict[str, Any] | None:
    """Return the last kept run of a suite."""
    files = sorted(folder.glob(f"{suite}-*.json"))
    return json.loads(files[-1].read_text(encoding="utf-8")) if files else None


def describe(suite: str, discovery: Discovery, quick: bool) -> dict[str, Any]:
    """Return date, machine and versions."""
    return {
        "suite": suite,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "quick": quick,
        "machine": machine.describe(),
        "peers": {peer.name: peer.version for peer in discovery.adapters},
        "missing": {missing.name: missing.reason for missing in discovery.missing},
    }


def file_name(suite: str, about: dict[str, Any]) -> str:
    """Return the name of a results file; git ignores local-*, the files of quick runs."""
    return f"{'local-' if about['quick'] else ''}{suite}-{about['date'][:16].replace(':', '')}.json"
