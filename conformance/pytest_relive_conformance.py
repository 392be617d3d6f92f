"""A pytest plugin: `pytest --relive-conformance my_package:MyBuffer` adds one test for each conformance case.

It is a module of its own, because pytest imports every plugin at its start, and this one must not import torch.
"""

from __future__ import annotations

from typing import Any

import pytest

OPTION = "--relive-conformance"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option, which may be repeated for several buffers."""
    parser.getgroup("relive").addoption(
        OPTION, metavar="TARGET", action="append", default=[], help="test my_package:MyBuffer against all cases"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add one item per target and case after the collected tests."""
    for target in config.getoption(OPTION) or ():
        items.extend(_items(session, target))


def _items(session: pytest.Session, target: str) -> list[pytest.Item]:
    from relive_conformance import CASES  # noqa: PLC0415 (imports torch)
    from relive_conformance.target import find  # noqa: PLC0415

    try:
        adapter = find(target)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise pytest.UsageError(f"{OPTION} {target}: {error}") from error
    return [CaseItem.from_parent(session, name=f"{target}[{case}]", adapter=adapter, case=case) for case in CASES]


class CaseItem(pytest.Item):
    """One case on one buffer; skipped if the buffer does not offer what the case tests."""

    def __init__(self, *, adapter: Any, case: Any, **options: Any) -> None:
        super().__init__(**options)
        self.adapter, self.case = adapter, case

    def runtest(self) -> None:
        """Run the case."""
        outcome = self.case.run(self.adapter)
        if outcome.status == "not offered":
            pytest.skip(f"not offered: {outcome.reason}")
        if outcome.status == "differs":
            raise Difference(
                f"{self.case.title}: {self.case.sentence}\nexpected  {outcome.expected}\ngot       {outcome.got}"
            )

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the expected and the actual result, without a traceback."""
        if isinstance(excinfo.value, Difference):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, None, str]:
        """Return the location and the name that pytest prints."""
        return self.path, None, self.name


class Difference(AssertionError):
    """Raised if the result of a buffer differs."""
