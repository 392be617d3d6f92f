"""Time the calls of training loops on our adapters and on the originals, interleaved.

Run it as `python -m benchmarks.adapters [--quick] [--only agilerl,rsl_rl] [--python PATH] [--json PATH]`. An original
that conflicts with this environment is timed in another one: `--python` names its interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from .adapter_cases import Case
from .interpreters import add_python_option, finish_with_interpreters
from .machine import installed_version
from .report import Line, Result
from .suite import Session, make_parser
from .timing import Contestant, Role

ORIGINALS = {
    "agilerl": "AgileRL",
    "apexrl": "ApexRL",
    "embodichain": "EmbodiChain",
    "rl_buffer": "rl-buffer",
    "rsl_rl": "rsl_rl",
    "stable_baselines3": "Stable-Baselines3",
}
"""Names of the originals in reports, by module; our adapter and the cases of an original have the same module name."""
DISTRIBUTIONS = {"rl_buffer": "rl-buffer", "rsl_rl": "rsl-rl-lib", "stable_baselines3": "stable-baselines3"}


def load_cases(original: str) -> list[Case] | str:
    """Return the cases of an original, or the reason why it cannot be timed."""
    try:
        import_module(original)
        return import_module(f"{__package__}.adapter_cases.{original}").cases()
    except ModuleNotFoundError as error:
        return "not installed" if error.name == original else f"{error}"
    # A half-installed library may raise anything at import: a missing symbol, a binary of another ABI.
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def enter(original: str, case: Case) -> tuple[Result, list[Contestant]]:
    """Set up both sides of a case; the result names a side that did not start."""
    title = ORIGINALS[original]
    result, contestants = Result(f"{title}: {case.name}", []), []
    sides: list[tuple[str, Role, Callable[[], Callable[[], Any]]]] = [
        ("relive", "ours", case.ours),
        (title, "peer", case.theirs),
    ]
    for name, role, make in sides:
        try:
            contestants.append(Contestant(name, role, make()))
        # A call that raises must not end the run; the report has its error.
        except Exception as error:
            result.refused[name] = f"{type(error).__name__}: {error}"
    return result, contestants


def run_here(session: Session) -> list[tuple[Result, list[Line]]]:
    """Time every original that is installed, and note those that are not."""
    outcomes = []
    originals: list[str] = session.options.only
    for original in originals:
        cases, title = load_cases(original), ORIGINALS[original]
        if isinstance(cases, str):
            session.about["missing"][title] = cases
            continue
        session.about["peers"][title] = installed_version(DISTRIBUTIONS.get(original, original)) or "a source tree"
        for case in cases:
            with session.console.status(f"{title}: {case.name}"):
                outcomes.append(session.time(enter(original, case)))
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite."""
    parser = make_parser("adapters", __doc__ or "", ORIGINALS)
    add_python_option(parser)
    session = Session.create("adapters", parser.parse_args(arguments))
    return finish_with_interpreters(session, run_here(session), ORIGINALS.__getitem__)


if __name__ == "__main__":
    raise SystemExit(main())
