"""One prefix is the whole migration: what an adapter lacks of its original is the original's own."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_PREFIX = f"{__package__}."


def forward(original: str, *, again: Sequence[str] = (), ours: Iterable[type] = ()) -> None:
    """Let `import relive.compat.original.x` be `import original.x` for every module x that the adapter lacks.

    The modules of `again`, and those below them, are executed a second time, with our prefix at their imports:
    algorithms that make their own buffers make ours. All others are the original's modules themselves, so that classes
    stay the same; but where one has a class that one of `ours` inherits from and has the name of, ours takes its place.
    """
    if not any(isinstance(finder, _Forwarding) and finder.original == original for finder in sys.meta_path):
        ours_of = {base: each for each in ours for base in each.__mro__[1:] if base.__name__ == each.__name__}
        sys.meta_path.insert(0, _Forwarding(original, again, ours_of))


def names_of(original: str, *, again: bool = False) -> Callable[[str], Any]:
    """The `__getattr__` of the adapter's module of this original: names that it lacks are the original's.

    With `again` they are those of the original executed a second time, as `forward` says.
    """

    def found(name: str) -> Any:
        try:
            module = _second(original) if again else importlib.import_module(original)
        except ModuleNotFoundError as error:
            raise AttributeError(f"no {name!r} here, and none of the original: {error}") from error
        value = getattr(module, name)
        is_part = isinstance(value, ModuleType) and value.__name__ == f"{original}.{name}"
        return importlib.import_module(f"{_PREFIX}{value.__name__}") if is_part else value  # which may be ours

    return found


@cache
def _second(original: str) -> ModuleType:
    """A module of an original, executed a second time."""
    found = importlib.util.find_spec(original)
    if found is None:
        raise ModuleNotFoundError(f"No module named {original!r}")
    loader = _Again(found)
    module = importlib.util.module_from_spec(ModuleSpec(f"{_PREFIX}{original}", loader, is_package=True))
    loader.exec_module(module)
    return module


class _Forwarding(MetaPathFinder):
    """Finds the modules below one adapter. It comes before Python's own finders, which would load a second copy."""

    def __init__(self, original: str, again: Sequence[str], ours_of: Mapping[type, type]) -> None:
        self.original, self.again, self.ours_of = original, again, ours_of

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The original's module of that name, unless it is the adapter's or nobody's."""
        if not fullname.startswith(f"{_PREFIX}{self.original}."):
            return None
        known = fullname.removeprefix(_PREFIX)
        own = Path(__file__).parent.joinpath(*known.split("."))
        if own.is_dir() or own.with_suffix(".py").exists():
            return None
        try:
            found = importlib.util.find_spec(known)
        except ValueError:  # a stand-in for the module, which has no specification
            found = ModuleSpec(known, None, is_package=True)
        if found is None:
            return None
        is_second = found.loader is not None and self._is_executed_again(known.removeprefix(f"{self.original}."))
        loader = _Again(found) if is_second else _Forwarded(known, self.ours_of)
        return ModuleSpec(fullname, loader, is_package=found.submodule_search_locations is not None)

    def _is_executed_again(self, name: str) -> bool:
        """Packages of such modules, too: a module is an attribute of its package, and the original's has its own."""
        return any(f"{name}.".startswith(f"{each}.") or each.startswith(f"{name}.") for each in self.again)


class _Forwarded(Loader):
    """Gives a module of another name, or a new one like it where a class of ours takes the place of one in it."""

    def __init__(self, original: str, ours_of: Mapping[type, type]) -> None:
        self.original, self.ours_of = original, ours_of

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The original module itself, or None for a new one."""
        module = importlib.import_module(self.original)
        self.module, self.spec = module, getattr(module, "__spec__", None)
        classes = {name: value for name, value in vars(module).items() if isinstance(value, type)}
        self.changed = {name: self.ours_of[kind] for name, kind in classes.items() if kind in self.ours_of}
        return None if self.changed else module

    def exec_module(self, module: ModuleType) -> None:
        """Leave an original as it is, executed under its own name; fill a new module."""
        if module is self.module:
            module.__spec__ = self.spec
            return
        same = {name: value for name, value in vars(self.module).items() if not isinstance(value, ModuleType)}
        vars(module).update({name: value for name, value in same.items() if name not in vars(module)} | self.changed)
        vars(module)["__getattr__"] = names_of(self.original)


class _Again(Loader):
    """Executes the code of an original's module with our prefix at its imports, also at those inside functions."""

    def __init__(self, original: ModuleSpec) -> None:
        self.original = original

    def exec_module(self, module: ModuleType) -> None:
        """As a module of our name, whose source is the original's file."""
        loader: Any = self.original.loader
        imports = partial(_prefixed_import, self.original.name.partition(".")[0])
        module.__file__ = self.original.origin
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": imports}
        exec(loader.get_code(self.original.name), vars(module))


def _prefixed_import(root: str, name: str, *arguments: Any, **named: Any) -> ModuleType:
    """What Python's `__import__` does, with our prefix at the modules of `root`."""
    if name.partition(".")[0] != root:
        return builtins.__import__(name, *arguments, **named)
    ours = builtins.__import__(f"{_PREFIX}{name}", *arguments, **named)
    # Without names to take from it, an import gives the root package.
    return sys.modules[f"{_PREFIX}{root}"] if ours.__name__ == "relive" else ours
