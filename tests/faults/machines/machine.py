"""Rules for every kind of buffer and its model: saves, loads, failing disks, wrong calls."""

from __future__ import annotations

import copy
import errno
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import relive as rl
from relive import kernels
from relive.checkpoint.archive import Archive
from relive.checkpoint.saving import save
from tests.checkpoint.traffic import digest as contents
from tests.checkpoint.traffic import equal
from tests.faults.checkpoint.disk import watch_files
from tests.faults.digest import digest

WrongCall = Callable[[], object]
REFUSALS = (rl.SchemaError, rl.NotReadyError, rl.BufferFullError, rl.PriorityError, IndexError)


class Machine(RuleBasedStateMachine):
    """A buffer and its model, which receive the same calls.

    A machine of one kind sets `buffer` and `model` (which is copied with each save), compares them in `compare`, and
    names calls that must be refused in `wrong_calls`.
    """

    ran: ClassVar[Counter[str]] = Counter()
    """Number of calls of each rule, over all histories."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer: Any = None
        self.model: Any = None
        self.serial = 0
        self.saved: dict[int, tuple[Any, Any]] = {}
        """Expected contents of each checkpoint: the model and the digest of the buffer."""
        self.lineages: dict[int, str] = {}
        """Lineage in each checkpoint's manifest."""
        self.base = 0
        """Checkpoint of the last save or load."""
        self._open = ExitStack()
        self.root = Path(self._open.enter_context(TemporaryDirectory())) / "root"

    def begin(self, *, native: bool) -> None:
        """Choose the kernels before the buffer is made."""
        self._open.enter_context(nullcontext() if native else kernels.force_torch())

    @property
    def memory(self) -> Any:
        """`device=` of the buffer.

        Disk memory is plugged in here: a machine that returns `Memory.disk(folder)` gets one more rule, `reopen`, which
        drops the buffer without a word and makes it again over the same folder. The model stays, or (after a kill)
        loses the rows since the last commit; `compare` does the rest.
        """
        return "cpu"

    def fresh(self) -> int:
        """Return a new number, to recognise the value that carries it."""
        self.serial += 1
        return self.serial

    def count(self, what: str) -> None:
        """Count a call of a rule."""
        self.ran[what] += 1

    def compare(self) -> None:
        """Assert that the buffer equals the model."""
        raise NotImplementedError

    def wrong_calls(self) -> list[WrongCall]:
        """Calls that the buffer must refuse in its current state."""
        raise NotImplementedError

    @precondition(lambda self: self.buffer is not None)
    @invariant()
    def holds(self) -> None:
        self.buffer.check()
        self.compare()

    @rule(keep=st.integers(1, 3))
    def save(self, keep: int) -> None:
        with another_lineage():
            number = self.buffer.save(self.root, keep=keep)
        self._check_lineage(number)
        others = {n for n in self.saved if self.lineages[n] != self.lineages[number]}
        own = sorted({*self.saved, number} - others)[-keep:]
        assert sorted([*others, *own]) == self._numbers()
        self._remember(number)
        self.count("save")

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from([None, *sorted(self.saved)]), "number")
        model, expected = self.saved[max(self.saved) if number is None else number]
        self.buffer = rl.load(self.root, number=number)
        self.base = max(self.saved) if number is None else number
        assert equal(contents(self.buffer), expected)
        self.model = copy.deepcopy(model)
        self.count("load")

    @rule(point=st.integers(0, 45), code=st.sampled_from([errno.EIO, errno.ENOSPC]), keep=st.integers(1, 3))
    def save_while_the_disk_fails(self, point: int, code: int, keep: int) -> None:
        def fail(_: str, n: int, __: Any) -> None:
            if n == point:
                raise OSError(code, os.strerror(code))

        then = contents(self.buffer)
        try:
            with another_lineage():
                number = save(self.buffer, self.root, keep=keep, files=watch_files(fail))
        except rl.CheckpointError:
            there = self._numbers()
            assert set(self.saved) <= set(there), "a save that failed has removed a checkpoint"
            number = next((n for n in there if n not in self.saved), None)  # the save failed after its last write
            self.count("save that failed")
        assert equal(contents(self.buffer), then)
        if number is not None:
            self._check_lineage(number, may_start=True)
            self._remember(number)

    @rule(data=st.data())
    def make_wrong_call(self, data: st.DataObject) -> None:
        calls = self.wrong_calls()
        call = calls[data.draw(st.integers(0, len(calls) - 1), "call")]
        then = digest(self.buffer)
        with pytest.raises(REFUSALS):
            call()
        assert digest(self.buffer) == then
        self.count("wrong call")

    def _check_lineage(self, number: int, *, may_start: bool = False) -> None:
        """Assert the lineage of a new checkpoint: that of the buffer's last one, or a new one if that was continued.

        A failing disk may hide a continuation; then the save `may_start` a new lineage.
        """
        lineage = Archive(self.root).read_manifest(number).lineage
        expected = self.lineages.get(self.base)
        if any(n > self.base and self.lineages[n] == expected for n in self.saved):
            expected = None
        is_new = lineage not in self.lineages.values()
        assert is_new if expected is None else lineage == expected or (may_start and is_new)
        self.lineages[number], self.base = lineage, number

    def _remember(self, number: int) -> None:
        self.saved[number] = copy.deepcopy(self.model), contents(self.buffer)
        self.saved = {number: self.saved[number] for number in self._numbers()}

    def _numbers(self) -> list[int]:
        folder = self.root / "manifests"
        return sorted(int(path.stem) for path in folder.iterdir()) if folder.exists() else []

    def teardown(self) -> None:
        self._open.close()


@contextmanager
def another_lineage() -> Iterator[None]:
    """Allow the warning that a buffer loaded from an older checkpoint starts a new lineage."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "save to .*: checkpoints of another buffer are there")
        yield
