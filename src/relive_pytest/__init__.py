"""A pytest plugin: `pytest --relive-conformance my_package:MyBuffer` adds one test for each conformance case.

It lies beside the package, not in it: pytest imports every plugin at its start, and this one must not bring torch.
"""

from __future__ import annotations

from typing import Any

import pytest

OPTION = "--relive-conformance"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option; it may be given again for further buffers."""
    parser.getgroup("relive").addoption(
        OPTION, metavar="TARGET", action="append", default=[], help="test my_package:MyBuffer against all cases"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """One item for each target and case, after the tests that were collected."""
    for target in config.getoption(OPTION) or ():
        items.extend(_items(session, target))


def _items(session: pytest.Session, target: str) -> list[pytest.Item]:
    from relive.conformance import CASES  # noqa: PLC0415 (only whoever asks pays for torch)
    from relive.conformance.target import find  # noqa: PLC0415

    peer = find(target)
    return [CaseItem.from_parent(session, name=f"{target}[{case}]", peer=peer, case=case) for case in CASES]


class CaseItem(pytest.Item):
    """One case asked of one buffer; what it does not offer is skipped."""

    def __init__(self, *, peer: Any, case: Any, **options: Any) -> None:
        super().__init__(**options)
        self.peer, self.case = peer, case

    def runtest(self) -> None:
        """Ask."""
        outcome = self.case.run(self.peer)
        if outcome.status == "not offered":
            pytest.skip(f"not offered: {outcome.reason}")
        if outcome.status == "differs":
            raise Difference(
                f"{self.case.title}: {self.case.sentence}\nexpected  {outcome.expected}\ngot       {outcome.got}"
            )

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The figures, not the way to them."""
        if isinstance(excinfo.value, Difference):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, None, str]:
        """Where pytest says it is."""
        return self.path, None, self.name


class Difference(AssertionError):
    """A case came out otherwise."""
