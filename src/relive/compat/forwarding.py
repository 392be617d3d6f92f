"""One prefix is the whole migration: modules of an original that an adapter does not have are the original's own."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


def forward(package: str, folder: Path, original: str) -> None:
    """Let `import package.x` be `import original.x` for every module x that `folder`, the package's own, lacks."""
    if not any(isinstance(finder, _Forwarding) and finder.package == package for finder in sys.meta_path):
        sys.meta_path.insert(0, _Forwarding(package, folder, original))


class _Forwarding(MetaPathFinder):
    """Finds the modules below one package. It comes before Python's own finders, which would load a second copy."""

    def __init__(self, package: str, folder: Path, original: str) -> None:
        self.package, self.folder, self.original = package, folder, original

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The original's module of that name, unless it is the adapter's or nobody's."""
        if not fullname.startswith(f"{self.package}."):
            return None
        name = fullname.removeprefix(f"{self.package}.")
        own = self.folder.joinpath(*name.split("."))
        if own.is_dir() or own.with_suffix(".py").exists():
            return None
        known = f"{self.original}.{name}"
        found = importlib.util.find_spec(known)
        return (
            None
            if found is None
            else ModuleSpec(fullname, _Alias(known), is_package=found.submodule_search_locations is not None)
        )


class _Alias(Loader):
    """Gives a module of another name instead of loading one."""

    def __init__(self, original: str) -> None:
        self.original = original
        self.spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The original module itself."""
        module = importlib.import_module(self.original)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has been executed under its own name, which it keeps."""
        module.__spec__ = self.spec
