"""Settings and states of samplers in files. Every sampler that `relive.replay.samplers` exports can be restored."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

import torch

from relive.checkpoint.snapshot import sum_bytes
from relive.errors import IncompatibleCheckpoint, explain
from relive.replay import samplers
from relive.replay.samplers.sampler import Sampler
from relive.storage.codec import JsonNode, SnapshotReader

_MAX_SLOT_BYTES = 64
"""Maximum bytes per slot of a saved sampler."""


def sampler_classes() -> dict[str, type]:
    """Return the exported sampler classes, by name."""
    exported_names = {name: getattr(samplers, name) for name in samplers.__all__}
    return {name: kind for name, kind in exported_names.items() if isinstance(kind, type) and is_dataclass(kind)}


def make_sampler_config(sampler: Sampler | samplers.Linear) -> dict[str, Any] | None:
    """Return name and settings of a sampler as JSON; None for a user's class. A setting that is a function is null."""
    name = type(sampler).__name__
    if sampler_classes().get(name) is not type(sampler):
        return None
    settings: dict[str, Any] = {"name": name}
    for field in fields(sampler):  # pyright: ignore[reportArgumentType] (one of `sampler_classes`)
        value = getattr(sampler, field.name)
        setting = make_sampler_config(value) if isinstance(value, Sampler | samplers.Linear) else value
        if setting is None and value is not None:
            return None
        settings[field.name] = None if callable(setting) else setting
    return settings


def load_sampler(node: JsonNode, override: Sampler | None = None) -> Sampler:
    """Make a sampler from its saved settings, or return `override` if the caller passed one."""
    if override is not None:
        return override
    if node.none_if_null() is None:
        remedy = "Pass sampler= to load, equal to the sampler of the saved buffer."
        raise IncompatibleCheckpoint(
            explain("sampler", "a sampler of relive, which load can make", "a custom sampler", remedy)
        )
    kind: Any = sampler_classes()[node.entry("name").one_of(sampler_classes())]
    return kind(**{each.name: _read_setting(node.entry(each.name), each) for each in fields(kind)})


def _read_setting(node: JsonNode, declared: Field[Any]) -> Any:
    """Read a setting of the type of its default. The sampler's constructor verifies the value."""
    default = declared.default_factory() if declared.default_factory is not MISSING else declared.default
    if isinstance(node.value, dict):
        return load_sampler(node)
    if node.value is None:
        expected, got = "a setting that files can hold, such as rl.Linear(start, end, draws)", "a function"
        remedy = "Pass sampler= to load, with the function of the saved buffer or with rl.Linear in its place."
        raise IncompatibleCheckpoint(explain(f"sampler: {declared.name}", expected, got, remedy))
    if isinstance(default, bool):
        return node.flag()
    if isinstance(default, float):
        return node.number()
    if default is not MISSING and type(node.value) is not type(default):
        raise node.error(f"a value like {default!r}")
    return node.value


class _UnscaledPrioritized(samplers.Prioritized):
    """Prioritized sampler that keeps loaded priorities unchanged, whatever their alpha and eps were."""

    __qualname__ = "Prioritized"

    def rescale_priorities(self, alpha: float, eps: float) -> None: ...


STAND_INS: tuple[Sampler, ...] = (
    _UnscaledPrioritized(),
    samplers.Counted(_UnscaledPrioritized()),
    samplers.Uniform(),
    samplers.Counted(samplers.Uniform()),
)
"""Samplers to inspect a buffer whose own sampler cannot be made; together they load every state of our samplers."""


def load_sampler_state(sampler: Sampler, saved: SnapshotReader, config: JsonNode) -> None:
    """Load the saved state of a bound sampler; `config` is the config of the saved buffer."""
    expected, slots = sampler.state(), sampler.storage.num_slots
    arrays = saved.read_all_arrays(max(sum_bytes(expected), _MAX_SLOT_BYTES * slots) + (1 << 20))
    optional = sampler.optional_state
    state = {name: array for name, array in arrays.items() if name in expected or name not in optional}
    for name in optional & expected.keys():
        state.setdefault(name, torch.zeros_like(expected[name]))
    types = [{name: (array.dtype, array.ndim) for name, array in each.items()} for each in (state, expected)]
    if types[0] != types[1]:
        remedy = "Pass sampler= to load, equal to the sampler of the saved buffer."
        raise IncompatibleCheckpoint(explain("sampler", f"the state of {sampler}", sorted(state), remedy))
    try:
        sampler.load_state(state)
        saved_exponents = _read_alpha_and_eps(config.value.get("sampler"))
        if saved_exponents is not None:
            sampler.rescale_priorities(*saved_exponents)
    except ValueError as error:
        raise JsonNode("state: sampler", str(error)).error("the state of a sampler") from None


def _read_alpha_and_eps(config: Any) -> tuple[float, float] | None:
    """Return alpha and eps of the `Prioritized` in a sampler's config; None without one."""
    while isinstance(config, dict) and "sampler" in config:
        config = config["sampler"]
    if not isinstance(config, dict) or config.get("name") != "Prioritized":
        return None
    alpha, eps = (JsonNode(f"config: sampler: {name}", config.get(name)).number() for name in ("alpha", "eps"))
    return alpha, eps
