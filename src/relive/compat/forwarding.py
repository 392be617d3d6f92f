"""One prefix is the whole migration: what an adapter lacks of its original is the original's own."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

_PREFIX = f"{__package__}."


Makers = Mapping[str, Callable[[Any], Any]]
"""By the name of something of an original, the function that makes ours of it."""


def forward(original: str, *, again: Sequence[str] = (), ours: Makers = MappingProxyType({})) -> None:
    """Let `import relive.compat.original.x` be `import original.x` for every module x that the adapter lacks.

    The modules of `again`, and those below them, are executed a second time, with our prefix at their imports:
    algorithms that make their own buffers make ours. All others are the original's modules themselves, so that classes
    stay the same; but where one has a name of `ours`, what that function makes of the original's takes its place.
    """
    if not any(isinstance(finder, _Forwarding) and finder.original == original for finder in sys.meta_path):
        sys.meta_path.insert(0, _Forwarding(original, again, ours))


def in_place(*classes: type) -> Makers:
    """Each of these classes takes the place of the class of its name that it inherits from."""
    return {each.__name__: partial(_in_place, each) for each in classes}


def _in_place(ours: type, theirs: Any) -> Any:
    return ours if isinstance(theirs, type) and issubclass(ours, theirs) else theirs


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

    def __init__(self, original: str, again: Sequence[str], ours: Makers) -> None:
        self.original, self.again, self.ours = original, again, ours

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
        loader = _Again(found) if is_second else _Forwarded(known, self._changes)
        return ModuleSpec(fullname, loader, is_package=found.submodule_search_locations is not None)

    def _changes(self, module: ModuleType) -> dict[str, Any]:
        """What is ours among the names of an original's module."""
        names = vars(module)
        ours = {name: make(names[name]) for name, make in self.ours.items() if name in names}
        return {name: value for name, value in ours.items() if value is not names[name]}

    def _is_executed_again(self, name: str) -> bool:
        """Packages of such modules, too: a module is an attribute of its package, and the original's has its own."""
        return any(f"{name}.".startswith(f"{each}.") or each.startswith(f"{name}.") for each in self.again)


class _Forwarded(Loader):
    """Gives a module of another name, or one like it where something of ours takes the place of something in it."""

    def __init__(self, original: str, changes: Callable[[ModuleType], dict[str, Any]]) -> None:
        self.original, self.changes = original, changes

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The original module itself, or one like it."""
        module = importlib.import_module(self.original)
        self.spec = getattr(module, "__spec__", None)
        if not self.changes(module):
            return module
        _own_package(spec.name.rpartition(".")[0])
        return _Like(spec.name, module)

    def exec_module(self, module: ModuleType) -> None:
        """Leave an original as it is, executed under its own name; fill one like it, or load both again."""
        if not isinstance(module, _Like):
            module.__spec__ = self.spec
            return
        if module.ours:
            importlib.reload(module.original)
        module.fill(self.changes(module.original))


class _Like(ModuleType):
    """An original's module with some names of ours. All others are read from the original, and set there."""

    def __init__(self, name: str, original: ModuleType) -> None:
        super().__init__(name, original.__doc__)
        vars(self).update(original=original, ours={}, theirs={}, before={})

    def fill(self, ours: dict[str, Any]) -> None:
        """Take these in place of the original's."""
        vars(self).update(ours, ours=ours, theirs={name: getattr(self.original, name) for name in ours})

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":  # for `import *`
            names = vars(self.original)
            return names.get(name, [each for each in names if not each.startswith("_")])
        return names_of(self.original.__name__)(name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self.original), *vars(self)})

    def __setattr__(self, name: str, value: Any) -> None:
        is_part = isinstance(value, ModuleType) and value.__name__ == f"{self.__name__}.{name}"
        if is_part or name in self.ours or name.startswith("__"):
            super().__setattr__(name, value)
        if not is_part and not name.startswith("__"):
            if name in vars(self.original):
                self.before[name] = vars(self.original)[name]
            setattr(self.original, name, self.theirs[name] if value is self.ours.get(name, self) else value)

    def __delattr__(self, name: str) -> None:
        if name in vars(self):
            super().__delattr__(name)
        elif name in self.before:  # mocks delete what they have set here: it never was in this module's own names
            setattr(self.original, name, self.before.pop(name))
        else:
            delattr(self.original, name)


def _own_package(name: str) -> None:
    """Put a package like it in the place of an original's package, which has its own module of each name.

    Python makes the modules that it has loaded attributes of their package.
    """
    package = sys.modules[name]
    if package.__name__ != name:
        parent, _, part = name.rpartition(".")
        _own_package(parent)
        like = _Like(name, package)
        like.__path__ = []
        sys.modules[name] = like
        setattr(sys.modules[parent], part, like)


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
