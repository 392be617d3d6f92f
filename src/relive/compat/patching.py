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
from typing import Any

from relive.errors import explain

__all__ = ["ORIGINALS", "patch", "unpatch"]


@dataclass(frozen=True)
class Original:
    """A library with buffers that ours can replace."""

    distribution: str
    tested: tuple[str, ...]
    """The versions, as major.minor, that our adapter was tested with."""
    modules: tuple[str, ...]
    """Modules with buffers; ours have the same paths below `relive.compat`. Releases may lack some of them."""
    companion: str | None = None
    """Another original to patch at the same time, if installed: its buffers inherit from these or vice versa."""


ORIGINALS = {
    "agilerl": Original(
        "agilerl", ("2.58",),
        tuple(f"components.{each}" for each in ("segment_tree", "replay_buffer", "data", "rollout_buffer")),
    ),
    "apexrl": Original(
        "apexrl", ("0.2",),
        tuple(
            f"buffer.{each}_buffer"
            for each in ("rollout", "replay", "distillation", "rollout_rnn", "multi_agent_rollout")
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


@dataclass
class Rebinding:
    """The names of an original that are bound to our objects."""

    pairs: list[tuple[str, Any, Any]]
    """Triples of a name, the original's object and our replacement."""
    changed: list[tuple[ModuleType, str, Any]] = field(default_factory=list)
    """Triples of a module, a rebound name and its previous value."""
    ours_before: set[tuple[str, str]] = field(default_factory=set)
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
    original = _original("patch", name)
    is_new = name not in _patched
    companions = [original.companion] if original.companion and _exists(original.companion) else []
    new_replacements = {root: list(replacements(root)) for root in (name, *companions) if root not in _rebindings}
    for root, pairs in new_replacements.items():
        _check_version(root, ORIGINALS[root], pairs)  # first: its warning may be configured to raise
    # Rebind after all imports: imported modules must see the original classes.
    for root, pairs in new_replacements.items():
        _rebindings[root] = _rebind(root, pairs)
    _patched.add(name)
    return Patch(name, is_new)


def unpatch(name: str) -> None:
    """Bind the names of an original's buffers to its own classes again; without an active patch, do nothing."""
    _original("unpatch", name)
    _patched.discard(name)
    active_roots = {each for still in _patched for each in (still, ORIGINALS[still].companion)}
    for each in _rebindings.keys() - active_roots:
        _undo(each, _rebindings.pop(each))


def _original(where: str, name: str) -> Original:
    if name not in ORIGINALS:
        raise ValueError(explain(where, f"one of {', '.join(ORIGINALS)}", repr(name), "Pass the package's name."))
    return ORIGINALS[name]


def _rebind(root: str, pairs: list[tuple[str, Any, Any]]) -> Rebinding:
    rebinding = Rebinding(pairs)
    in_place = {id(theirs): ours for _, theirs, ours in pairs}
    ours_too = {id(ours) for ours in in_place.values()}
    for module, name, value in list(_bindings(root, in_place.keys() | ours_too)):
        if id(value) in ours_too:
            rebinding.ours_before.add((module.__name__, name))
        else:
            setattr(module, name, in_place[id(value)])
            rebinding.changed.append((module, name, value))
    return rebinding


def _undo(root: str, rebinding: Rebinding) -> None:
    theirs_of = {id(ours): theirs for _, theirs, ours in rebinding.pairs}
    before = {(module.__name__, name): value for module, name, value in rebinding.changed}
    for module, name, value in list(_bindings(root, theirs_of)):
        place = module.__name__, name
        if place not in rebinding.ours_before:
            setattr(module, name, before.get(place, theirs_of[id(value)]))


def _bindings(root: str, ids: Collection[int]) -> Iterator[tuple[ModuleType, str, Any]]:
    """Yield the module-level names of an original's loaded modules that are bound to one of these objects."""
    for path, module in list(sys.modules.items()):
        if path.partition(".")[0] == root and isinstance(module, ModuleType):
            yield from ((module, name, value) for name, value in list(vars(module).items()) if id(value) in ids)


def replacements(root: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each replaced object, the original's object and ours."""
    original = ORIGINALS[root]
    paths = [path for path in original.modules if _exists(f"{root}.{path}")]
    if not paths:
        importlib.import_module(root)  # raises if the original is not installed
        expected = f"one of its modules {', '.join(original.modules)}"
        raise ImportError(explain(f"patch({root!r})", expected, "none of them", f"Install {original.tested[-1]}."))
    # Our modules first: they may inherit from the original classes.
    ours = [importlib.import_module(f"{__package__}.{root}.{path}") for path in paths]
    for path, module in zip(paths, ours, strict=True):
        theirs = vars(importlib.import_module(f"{root}.{path}"))
        for name, value in vars(module).items():
            is_ours = str(getattr(value, "__module__", "")).startswith(f"{__package__}.")
            if is_ours and name in theirs and theirs[name] is not value and not name.startswith("_"):
                yield name, theirs[name], value


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _check_version(root: str, original: Original, pairs: Sequence[tuple[str, Any, Any]]) -> None:
    """Warn about an untested version, and list its arguments that ours lack."""
    try:
        installed_version = version(original.distribution)
    except PackageNotFoundError:
        installed_version = "no version"
    if ".".join(installed_version.split(".")[:2]) in original.tested:
        return
    missing_arguments = [each for pair in pairs for each in differences(*pair)]
    remedy = (
        f"These differ from ours: {'; '.join(missing_arguments)}."
        if missing_arguments
        else "Its arguments are those of ours."
    )
    expected = f"{original.distribution} {' or '.join(original.tested)}, which was tested"
    warnings.warn(explain(f"patch({root!r})", expected, installed_version, remedy), stacklevel=4)


def differences(where: str, theirs: Any, ours: Any) -> Iterator[str]:
    """Yield the methods and arguments of the original that ours lacks."""
    if not inspect.isclass(theirs):
        if inspect.isroutine(theirs) and (arguments := _other_arguments(theirs, ours)):
            yield f"{where}{arguments}"
        return
    for name, member in vars(theirs).items():
        if name.startswith("_") and name != "__init__":
            continue
        if not hasattr(ours, name):
            yield f"{where}.{name} is missing"
        elif inspect.isfunction(member) and (arguments := _other_arguments(member, getattr(ours, name))):
            yield f"{where}.{name}{arguments}"


def _other_arguments(theirs: Any, ours: Any) -> str | None:
    """The original's arguments in brackets, if ours does not accept them in the same order; else None."""
    expected, our_parameters = (list(inspect.signature(each).parameters.values()) for each in (theirs, ours))
    if any(each.kind is each.VAR_POSITIONAL for each in our_parameters):
        return None
    names, our_names = ([p.name for p in each if p.name != "self"] for each in (expected, our_parameters))
    return None if our_names[: len(names)] == names else f"({', '.join(names)})"
