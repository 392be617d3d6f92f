"""One prefix is the whole migration: what an adapter lacks is the original's, and its algorithms make our buffers."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, patch

import pytest

import relive.compat.apexrl as adapter
from relive.compat.apexrl.buffer.rollout_buffer import RolloutBuffer
from relive.compat.forwarding import forward

SOURCES = {
    "apexrl/__init__.py": "def hello(): return 'hello'",
    "apexrl/utils/__init__.py": "from apexrl.utils.logger import Logger",
    "apexrl/utils/logger.py": "class Logger: pass",
    "apexrl/buffer/__init__.py": "",
    "apexrl/buffer/rollout_buffer.py": "class RolloutBuffer: pass",
    "apexrl/models/__init__.py": "class Actor: pass",
    "apexrl/algorithms/__init__.py": "from .ppo import PPO",
    "apexrl/algorithms/ppo.py": """
import apexrl.utils.logger
from apexrl.buffer.rollout_buffer import RolloutBuffer
from apexrl.models import Actor
class PPO:
    buffer, actor, logger = RolloutBuffer, Actor, apexrl.utils.logger.Logger
    def later(self):
        from apexrl.buffer import rollout_buffer
        return rollout_buffer
""",
}


@pytest.fixture(autouse=True)
def original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A small library of ApexRL's name, which is forgotten afterwards."""
    for path, source in SOURCES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(source)
    ours = [f"relive.compat.apexrl.{name}" for name in ("algorithms", "models", "utils.logger")]
    before = {name: module for name, module in sys.modules.items() if name.startswith(("apexrl", *ours))}
    for name in before:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith(("apexrl", *ours))]:
        del sys.modules[name]
        parent, _, child = name.rpartition(".")
        if parent.startswith("relive"):
            vars(sys.modules.get(parent, ModuleType(""))).pop(child, None)


def imported(name: str) -> Any:
    return importlib.import_module(name)


def test_names_and_modules_that_an_adapter_lacks_are_those_of_the_original() -> None:
    ours: Any = adapter
    assert ours.hello() == "hello"
    assert ours.utils.Logger is imported("apexrl.utils.logger").Logger
    assert imported("relive.compat.apexrl.models") is imported("apexrl.models")
    assert not hasattr(ours, "nothing")


def test_an_algorithm_makes_our_buffer_and_shares_all_other_classes() -> None:
    ppo = imported("relive.compat.apexrl.algorithms").PPO
    theirs = imported("apexrl.algorithms").PPO
    assert (ppo.buffer, ppo.actor, ppo.logger) == (RolloutBuffer, theirs.actor, theirs.logger)
    assert ppo().later().RolloutBuffer is RolloutBuffer
    assert theirs.buffer is not RolloutBuffer
    assert theirs().later().RolloutBuffer is theirs.buffer
    assert inspect.getsourcefile(ppo) == inspect.getsourcefile(theirs)


def test_a_stand_in_for_a_module_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apexrl.models", MagicMock())
    assert imported("relive.compat.apexrl.models") is sys.modules["apexrl.models"]


def test_without_the_original_a_name_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apexrl", None)
    with pytest.raises(AttributeError, match="no 'hello' here, and none of the original: .*apexrl"):
        _ = adapter.hello
    with pytest.raises(ImportError):
        imported("relive.compat.apexrl.models")


def test_a_module_executed_again_does_not_take_its_place_in_the_package_of_the_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ("toybox/__init__.py", "toybox/parts/__init__.py", "toybox/parts/trainer.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    adapter_of_it = ModuleType("relive.compat.toybox")
    adapter_of_it.__path__ = []
    monkeypatch.setitem(sys.modules, adapter_of_it.__name__, adapter_of_it)
    forward("toybox", again=["parts.trainer"])
    ours = imported("relive.compat.toybox.parts.trainer")
    assert imported("toybox.parts.trainer") is not ours
    assert imported("toybox.parts").trainer is not ours
    assert imported("relive.compat.toybox.parts").trainer is ours
    for name in [name for name in sys.modules if name.startswith(("toybox", "relive.compat.toybox."))]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def toyshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Our `toyshop.makers`, where `make` gives what the original's gives in a list."""
    (tmp_path / "toyshop").mkdir()
    (tmp_path / "toyshop/__init__.py").touch()
    source = "size = 1\ndef make(): return size\ndef use(): return make()"
    (tmp_path / "toyshop/makers.py").write_text(source)
    (tmp_path / "toyshop/inner").mkdir()
    (tmp_path / "toyshop/inner/__init__.py").touch()
    (tmp_path / "toyshop/inner/makers.py").write_text("def make(): return 2")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    adapter_of_it = ModuleType("relive.compat.toyshop")
    adapter_of_it.__path__ = []
    monkeypatch.setitem(sys.modules, adapter_of_it.__name__, adapter_of_it)
    forward("toyshop", ours={"make": lambda theirs: lambda: [theirs()], "absent": lambda theirs: 1 / 0})
    yield imported("relive.compat.toyshop.makers")
    for name in [name for name in sys.modules if name.startswith(("toyshop", "relive.compat.toyshop."))]:
        del sys.modules[name]


def test_a_name_is_remade_here_and_stays_as_it_is_in_the_original(toyshop: Any) -> None:
    theirs = imported("toyshop.makers")
    assert toyshop.make() == [1]
    assert theirs.make() == toyshop.use() == 1
    assert toyshop.use is theirs.use
    assert {"make", "use", "size"} <= set(toyshop.__all__)
    assert not hasattr(toyshop, "absent")


def test_what_is_set_here_is_set_in_the_original_until_it_is_undone(toyshop: Any) -> None:
    theirs = imported("toyshop.makers")
    before, ours = theirs.make, toyshop.make
    with patch.object(toyshop, "size", 5), patch("toyshop.makers.size", 6):
        assert toyshop.size == toyshop.use() == 6
    assert theirs.size == toyshop.use() == 1
    with patch.object(toyshop, "make", lambda: 7):
        assert toyshop.make() == theirs.use() == 7
    assert (toyshop.make, theirs.make) == (ours, before)
    toyshop.size = 5
    del toyshop.size  # as mocks do with a name that is not in the module's own dictionary
    assert theirs.size == toyshop.use() == 1


def test_what_is_set_twice_is_undone_once(toyshop: Any) -> None:
    theirs = imported("toyshop.makers")
    with patch.object(toyshop, "size", 5):
        with patch.object(toyshop, "size", 6):
            assert toyshop.use() == 6
        assert toyshop.use() == 5
    assert theirs.size == 1
    toyshop.size = 7
    with patch.object(toyshop, "size", 8):
        assert toyshop.use() == 8
    assert theirs.size == toyshop.use() == 7
    assert {"size", "use", "make"} <= set(dir(toyshop))


@pytest.mark.usefixtures("toyshop")
def test_a_module_with_a_remade_name_does_not_take_its_place_in_the_package_of_the_original() -> None:
    inner = imported("relive.compat.toyshop.inner.makers")
    assert inner.make() == [2]
    assert imported("toyshop.inner").makers is imported("toyshop.inner.makers")
    assert imported("toyshop.inner").makers.make() == 2


def test_a_module_with_a_remade_name_is_loaded_again_with_its_original(toyshop: Any) -> None:
    theirs = imported("toyshop.makers")
    theirs.size = 2
    assert importlib.reload(toyshop) is toyshop
    assert (toyshop.make(), theirs.size) == ([1], 1)
