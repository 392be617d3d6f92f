"""Replace an original library's buffers by ours inside its modules, so its unmodified trainers use ours."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, NamedTuple

from relive.errors import explain

__all__ = ["ORIGINALS", "patch", "unpatch"]


@dataclass(frozen=True)
class Original:
    """A library with buffers that ours can replace."""

    distribution: str
    tested_versions: tuple[str, ...]
    """The versions, as major.minor, that our adapter was tested with."""
    modules: tuple[str, ...]
    """Modules with buffers; ours have the same paths below `relive.compat`. Releases may lack some of them."""
    companion: str | None = None
    """Another original to patch at the same time, if installed: its buffers inherit from these or vice versa."""


ORIGINALS = {
    "agilerl": Original(
        "agilerl", ("2.58",),
        tuple(f"components.{module}" for module in ("segment_tree", "replay_buffer", "data", "rollout_buffer")),
    ),
    "apexrl": Original(
        "apexrl", ("0.2",),
        tuple(
            f"buffer.{kind}_buffer"
            for kind in ("rollout", "replay", "distillation", "rollout_rnn", "multi_agent_rollout")
        ),
    ),
    "embodichain": Original(
        "embodichain", ("0.3",),
        (
            "learning.rl.buffer.standard_buffer", "learning.rl.buffer.utils", "learning.rl.algo.common",
            # In releases before 0.2.3:
            "agents.rl.buffer.standard_buffer", "agents.rl.buffer.rollout_buffer", "agents.rl.buffer.utils",
            "agents.rl.algo.common",
        ),
    ),
    "rl_buffer": Original(
        "rl-buffer", ("0.1",),
        (
            "base_buffer", "replay_buffer", "prioritized_replay_buffer", "rollout_buffer", "shared_base_buffer",
            "shared_replay_buffer", "stats_tracker", "utils.sum_tree",
        ),
    ),
    "rsl_rl": Original("rsl-rl-lib", ("5.4", "5.5"), ("storage.rollout_storage",)),
    "stable_baselines3": Original(
        "stable-baselines3", ("2.9",), ("common.buffers", "her.her_replay_buffer"), "sb3_contrib"
    ),
    "sb3_contrib": Original(
        "sb3-contrib", ("2.9",), ("common.maskable.buffers", "common.recurrent.buffers"), "stable_baselines3"
    ),
}  # fmt: skip


class Replacement(NamedTuple):
    """A class or function of an original, and ours that replaces it."""

    name: str
    original: Any
    ours: Any


@dataclass
class Rebinding:
    """The names of an original that are bound to our objects."""

    replacements: list[Replacement]
    previous_values: dict[tuple[str, str], Any] = field(default_factory=dict)
    """The previous value of each rebound name, by module and name."""
    unchanged_names: set[tuple[str, str]] = field(default_factory=set)
    """Pairs of a module and a name that were bound to our object before the patch."""


_rebindings: dict[str, Rebinding] = {}
_patched: set[str] = set()


class Patch:
    """An active patch; as a context manager it ends with the block, unless it was active before."""

    def __init__(self, name: str, is_new: bool) -> None:
        self._name, self._is_new = name, is_new

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_new:
            unpatch(self._name)


def patch(name: str) -> Patch:
    """Bind the names of an original's buffers to ours in all of its modules, until `unpatch(name)`.

    `name` is the original's package. Modules of the original that are imported later get our buffers, too, and so does
    your code if it imports from the original after this call, or inside `with patch(name):`. Subclasses, default
    arguments, registries and names that were bound before stay unchanged, and so do spawned processes.

    An untested version gets one warning that lists the arguments that differ from ours.
    """
    original = _find_original("patch", name)
    is_new = name not in _patched
    companions = [original.companion] if original.companion and _can_import(original.companion) else []
    new_replacements = {root: list(replacements(root)) for root in (name, *companions) if root not in _rebindings}
    for root, pairs in new_replacements.items():
        _warn_untested(root, ORIGINALS[root], pairs)  # first: the warning may be configured to raise
    # Rebind after all imports: imported modules must see the original classes.
    for root, pairs in new_replacements.items():
        _rebindings[root] = _rebind(root, pairs)
    _patched.add(name)
    return Patch(name, is_new)


def unpatch(name: str) -> None:
    """Bind the names of an original's buffers to its own classes again; without an active patch, do nothing."""
    _find_original("unpatch", name)
    _patched.discard(name)
    active_roots = _patched | {ORIGINALS[root].companion for root in _patched}
    for root in _rebindings.keys() - active_roots:
        _undo(root, _rebindings.pop(root))


def _find_original(where: str, name: str) -> Original:
    if name not in ORIGINALS:
        raise ValueError(explain(where, f"one of {', '.join(ORIGINALS)}", repr(name), "Pass the package's name."))
    return ORIGINALS[name]


def _rebind(root: str, pairs: list[Replacement]) -> Rebinding:
    rebinding = Rebinding(pairs)
    ours_by_id = {id(pair.original): pair.ours for pair in pairs}
    our_ids = set(map(id, ours_by_id.values()))
    for module, name, value in list(_bindings(root, ours_by_id.keys() | our_ids)):
        if id(value) in our_ids:
            rebinding.unchanged_names.add((module.__name__, name))
        else:
            setattr(module, name, ours_by_id[id(value)])
            rebinding.previous_values[module.__name__, name] = value
    return rebinding


def _undo(root: str, rebinding: Rebinding) -> None:
    originals_by_id = {id(pair.ours): pair.original for pair in rebinding.replacements}
    for module, name, value in list(_bindings(root, originals_by_id)):
        key = module.__name__, name
        if key not in rebinding.unchanged_names:
            setattr(module, name, rebinding.previous_values.get(key, originals_by_id[id(value)]))


def _bindings(root: str, ids: Collection[int]) -> Iterator[tuple[ModuleType, str, Any]]:
    """Yield the module-level names of an original's loaded modules that are bound to one of these objects."""
    for path, module in list(sys.modules.items()):
        if path.partition(".")[0] == root and isinstance(module, ModuleType):
            yield from ((module, name, value) for name, value in list(vars(module).items()) if id(value) in ids)


def replacements(root: str) -> Iterator[Replacement]:
    """Yield the replacements of an original's objects."""
    original = ORIGINALS[root]
    paths = [path for path in original.modules if _can_import(f"{root}.{path}")]
    if not paths:
        importlib.import_module(root)  # raises if the original is not installed
        expected = f"one of its modules {', '.join(original.modules)}"
        raise ImportError(
            explain(f"patch({root!r})", expected, "none of them", f"Install {original.tested_versions[-1]}.")
        )
    # Our modules first: they may inherit from the original classes.
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


def _warn_untested(root: str, original: Original, pairs: Sequence[Replacement]) -> None:
    """Warn if the installed version is untested, and list its arguments that ours lack."""
    try:
        installed_version = version(original.distribution)
    except PackageNotFoundError:
        installed_version = "no version"
    if ".".join(installed_version.split(".")[:2]) in original.tested_versions:
        return
    lacks = [difference for pair in pairs for difference in differences(*pair)]
    remedy = f"These differ from ours: {'; '.join(lacks)}." if lacks else "Its arguments are those of ours."
    expected = f"{original.distribution} {' or '.join(original.tested_versions)}, which was tested"
    warnings.warn(explain(f"patch({root!r})", expected, installed_version, remedy), stacklevel=4)


def differences(where: str, original: Any, ours: Any) -> Iterator[str]:
    """Yield the methods and arguments of an original's class or function that ours lacks."""
    if not inspect.isclass(original):
        if inspect.isroutine(original) and (arguments := _missing_arguments(original, ours)):
            yield f"{where}{arguments}"
        return
    for name, member in vars(original).items():
        if name.startswith("_") and name != "__init__":
            continue
        if not hasattr(ours, name):
            yield f"{where}.{name} is missing"
        elif inspect.isfunction(member) and (arguments := _missing_arguments(member, getattr(ours, name))):
            yield f"{where}.{name}{arguments}"


def _missing_arguments(original: Any, ours: Any) -> str | None:
    """Return the original's arguments in brackets if ours does not accept them in the same order, else None."""
    expected, accepted = (list(inspect.signature(function).parameters.values()) for function in (original, ours))
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in accepted):
        return None
    names, our_names = (
        [parameter.name for parameter in parameters if parameter.name != "self"] for parameters in (expected, accepted)
    )
    return None if our_names[: len(names)] == names else f"({', '.join(names)})"
