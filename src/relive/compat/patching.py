"""Replaces the buffers of another library by relive's in its modules, so that its unmodified trainers use relive's."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, NamedTuple

from relive.errors import explain

__all__ = ["ORIGINALS", "patch", "unpatch"]


@dataclass(frozen=True)
class OriginalLibrary:
    """A library whose buffers relive's buffers can replace."""

    distribution: str
    tested_versions: tuple[str, ...]
    """The versions, as major.minor, that relive's adapter was tested with."""
    modules: tuple[str, ...]
    """Paths of modules with buffers, below the library's package and below relive's package for this library.

    Some releases of the library lack some of these modules.
    """
    companion: str | None = None
    """Another library to patch at the same time, if installed: its buffers inherit from these or vice versa."""


ORIGINALS = {
    "agilerl": OriginalLibrary(
        "agilerl", ("2.58",),
        tuple(f"components.{module}" for module in ("segment_tree", "replay_buffer", "data", "rollout_buffer")),
    ),
    "apexrl": OriginalLibrary(
        "apexrl", ("0.2",),
        tuple(
            f"buffer.{kind}_buffer"
            for kind in ("rollout", "replay", "distillation", "rollout_rnn", "multi_agent_rollout")
        ),
    ),
    "embodichain": OriginalLibrary(
        "embodichain", ("0.3",),
        (
            "learning.rl.buffer.standard_buffer", "learning.rl.buffer.utils", "learning.rl.algo.common",
            # The modules below are for releases before 0.2.3, which have these paths.
            "agents.rl.buffer.standard_buffer", "agents.rl.buffer.rollout_buffer", "agents.rl.buffer.utils",
            "agents.rl.algo.common",
        ),
    ),
    "rl_buffer": OriginalLibrary(
        "rl-buffer", ("0.1",),
        (
            "base_buffer", "replay_buffer", "prioritized_replay_buffer", "rollout_buffer", "shared_base_buffer",
            "shared_replay_buffer", "stats_tracker", "utils.sum_tree",
        ),
    ),
    "rsl_rl": OriginalLibrary("rsl-rl-lib", ("5.4", "5.5"), ("storage.rollout_storage",)),
    "stable_baselines3": OriginalLibrary(
        "stable-baselines3", ("2.9",), ("common.buffers", "her.her_replay_buffer"), "sb3_contrib"
    ),
    "sb3_contrib": OriginalLibrary(
        "sb3-contrib", ("2.9",), ("common.maskable.buffers", "common.recurrent.buffers"), "stable_baselines3"
    ),
}  # fmt: skip


class Replacement(NamedTuple):
    """A class or function of a library, and relive's that replaces it."""

    name: str
    original: Any
    ours: Any


class _Rebinding(NamedTuple):
    """The names in a library's modules that `patch` has bound to relive's objects."""

    replacements: list[Replacement]
    previous_values: dict[tuple[str, str], Any]
    """The value of each name before the patch, by module and name."""


_rebindings: dict[str, _Rebinding] = {}
_patched: set[str] = set()


def patch(name: str) -> AbstractContextManager[object]:
    """Bind the names of a library's buffers to relive's in all of its modules, until `unpatch(name)`.

    `name` is the library's package. Modules of the library that are imported later get relive's buffers, too, and so
    does your code if it imports from the library after this call, or inside `with patch(name):`. Subclasses, default
    arguments, registries and names that were bound before stay unchanged, and so do spawned processes.

    As a context manager, the patch ends with the block, unless it was active before.
    An untested version gets one warning that lists the arguments that differ from relive's.
    """
    original = _find_original("patch", name)
    companions = [original.companion] if original.companion and _can_import(original.companion) else []
    new_replacements = {root: list(find_replacements(root)) for root in (name, *companions) if root not in _rebindings}
    # The warning precedes any rebinding, because it may be configured to raise.
    for root, replacements in new_replacements.items():
        _warn_if_untested(root, ORIGINALS[root], replacements)
    # Names are rebound after all imports, because imported modules must see the library's own classes.
    for root, replacements in new_replacements.items():
        _rebindings[root] = _rebind_names(root, replacements)
    end_of_block = ExitStack()
    if name not in _patched:
        end_of_block.callback(unpatch, name)
    _patched.add(name)
    return end_of_block


def unpatch(name: str) -> None:
    """Bind the names of a library's buffers to its own classes again; without an active patch, do nothing."""
    _find_original("unpatch", name)
    _patched.discard(name)
    active_roots = _patched | {ORIGINALS[root].companion for root in _patched}
    for root in _rebindings.keys() - active_roots:
        replacements, previous_values = _rebindings.pop(root)
        originals_by_id = {id(pair.ours): pair.original for pair in replacements}
        for module, attribute, value in list(_find_bindings(root, originals_by_id)):
            original = originals_by_id[id(value)]
            setattr(module, attribute, previous_values.get((module.__name__, attribute), original))


def _find_original(where: str, name: str) -> OriginalLibrary:
    if name not in ORIGINALS:
        raise ValueError(explain(where, f"one of {', '.join(ORIGINALS)}", repr(name), "Pass the package's name."))
    return ORIGINALS[name]


def _rebind_names(root: str, replacements: list[Replacement]) -> _Rebinding:
    ours_by_id = {id(pair.original): pair.ours for pair in replacements}
    # A name that is already bound to relive's class is recorded, too, so that `unpatch` does not change this name.
    bindings = list(_find_bindings(root, {*ours_by_id, *map(id, ours_by_id.values())}))
    for module, attribute, value in bindings:
        setattr(module, attribute, ours_by_id.get(id(value), value))
    return _Rebinding(replacements, {(module.__name__, attribute): value for module, attribute, value in bindings})


def _find_bindings(root: str, object_ids: Collection[int]) -> Iterator[tuple[ModuleType, str, Any]]:
    """Yield the module-level names of a library's loaded modules that are bound to an object with one of these ids."""
    for path, module in list(sys.modules.items()):
        if path.partition(".")[0] == root and isinstance(module, ModuleType):
            yield from ((module, name, value) for name, value in list(vars(module).items()) if id(value) in object_ids)


def find_replacements(root: str) -> Iterator[Replacement]:
    """Yield every class and function of a library that relive replaces, with its replacement."""
    original = ORIGINALS[root]
    paths = [path for path in original.modules if _can_import(f"{root}.{path}")]
    if not paths:
        # This import raises if the library is not installed; an installed library without the modules raises below.
        importlib.import_module(root)
        expected = f"one of its modules {', '.join(original.modules)}"
        raise ImportError(
            explain(f"patch({root!r})", expected, "none of them", f"Install {original.tested_versions[-1]}.")
        )
    # relive's modules are imported first, since they may inherit from the library's classes.
    our_modules = [importlib.import_module(f"{__package__}.{root}.{path}") for path in paths]
    for path, module in zip(paths, our_modules, strict=True):
        originals = vars(importlib.import_module(f"{root}.{path}"))
        for name, value in vars(module).items():
            is_ours = str(getattr(value, "__module__", "")).startswith(f"{__package__}.")
            if is_ours and name in originals and originals[name] is not value and not name.startswith("_"):
                yield Replacement(name, originals[name], value)


def _can_import(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _warn_if_untested(root: str, original: OriginalLibrary, replacements: Sequence[Replacement]) -> None:
    """Warn if the installed version is untested; list the arguments that relive's classes lack."""
    try:
        installed_version = version(original.distribution)
    except PackageNotFoundError:
        installed_version = "no version"
    if ".".join(installed_version.split(".")[:2]) in original.tested_versions:
        return
    lacks = [difference for pair in replacements for difference in find_differences(*pair)]
    remedy = f"These differ from ours: {'; '.join(lacks)}." if lacks else "Its arguments are those of ours."
    expected = f"{original.distribution} {' or '.join(original.tested_versions)}, which was tested"
    warnings.warn(explain(f"patch({root!r})", expected, installed_version, remedy), stacklevel=4)


def find_differences(where: str, original: Any, ours: Any) -> Iterator[str]:
    """Yield the methods and arguments of a library's class or function that relive's lacks."""
    if not inspect.isclass(original):
        if inspect.isroutine(original) and (arguments := _format_missing_arguments(original, ours)):
            yield f"{where}{arguments}"
        return
    for name, member in vars(original).items():
        if name.startswith("_") and name != "__init__":
            continue
        if not hasattr(ours, name):
            yield f"{where}.{name} is missing"
        elif inspect.isfunction(member) and (arguments := _format_missing_arguments(member, getattr(ours, name))):
            yield f"{where}.{name}{arguments}"


def _format_missing_arguments(original: Any, ours: Any) -> str | None:
    """Return the arguments of `original` in brackets if relive's `ours` lacks them or their order, else None."""
    expected, accepted = (list(inspect.signature(function).parameters.values()) for function in (original, ours))
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in accepted):
        return None
    names, our_names = (
        [parameter.name for parameter in parameters if parameter.name != "self"] for parameters in (expected, accepted)
    )
    return None if our_names[: len(names)] == names else f"({', '.join(names)})"
