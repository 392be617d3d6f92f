"""The functions by which EmbodiChain's algorithms read a rollout `[N, T + 1]`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorDict

from relive.compat.seeding import experiment_seed, generator_on
from relive.schema.assembly import level, to_device
from relive.schema.checks import positive
from relive.schema.conversion import device_of

__all__ = ["iterate_minibatches", "transition_view"]


def transition_view(rollout: TensorDict, flatten: bool = False) -> TensorDict:
    """The transitions `[N, T]` of a rollout `[N, T + 1]`, or `[N · T]` of them, one environment after the other.

    Every field without its last slot, and "next_value", the value of what a step led to. Fields share the rollout's
    memory unless `flatten`, which copies.
    """
    fields: dict[str, Any] = dict(rollout.items())
    next_value = next_value_of(fields)
    if not all(type(field) is torch.Tensor for field in fields.values()):
        transitions = rollout[:, :-1]
        transitions["next_value"] = next_value
        return transitions.reshape(-1) if flatten else transitions
    steps = next_value.shape[1]
    leaves = {name: field.narrow(1, 0, steps) for name, field in fields.items()}
    leaves["next_value"] = next_value
    if flatten:
        leaves = {name: leaf.flatten(0, 1) for name, leaf in leaves.items()}
    return level(leaves, leaves["next_value"].shape, rollout.device)


def iterate_minibatches(
    rollout: TensorDict, batch_size: int, device: torch.device | str, *, seed: int | None = None
) -> Iterator[TensorDict]:
    """Every row of a flat rollout `[B]` once, shuffled, in batches on `device`; the last one may be shorter.

    Without a `seed`, the epochs of a rollout are drawn one after the other from one generator.
    """
    positive("batch_size", batch_size)
    first: Any = next(iter(rollout.values(True, True)))
    there, here = device_of(device), first.device
    generator = _generator_of(rollout, here) if seed is None else generator_on(here, seed)
    order = torch.randperm(len(rollout), generator=generator, device=here)
    batches = _read(rollout, order.split(batch_size))
    return batches if here == there else (to_device(batch, there) for batch in batches)


_generators: dict[int, tuple[int, torch.Generator]] = {}
"""By the id of a rollout that is alive, the seed of its first epoch and its generator."""


def _generator_of(rollout: TensorDict, device: torch.device) -> torch.Generator:
    """The generator of a rollout's epochs, which starts anew when torch was seeded or has drawn."""
    seed, key = experiment_seed(), id(rollout)
    if key not in _generators:
        weakref.finalize(rollout, _generators.pop, key, None).atexit = False
    if key not in _generators or _generators[key][0] != seed:
        _generators[key] = seed, generator_on(device, seed)
    return _generators[key][1]


def _read(rollout: TensorDict, parts: Iterable[torch.Tensor]) -> Iterator[TensorDict]:
    fields: dict[str, Any] = dict(rollout.items())
    if not all(type(field) is torch.Tensor for field in fields.values()):
        return (rollout[part] for part in parts)
    device = rollout.device
    return (level({name: x.index_select(0, part) for name, x in fields.items()}, part.shape, device) for part in parts)


def next_value_of(fields: Mapping[str, Any]) -> torch.Tensor:
    """The value of what each step led to [N, T]: the next slot's, but for truncated steps, after which a reset came."""
    value, truncated, final = fields["value"], fields.get("truncated"), fields.get("final_value")
    steps = value.shape[1] - 1
    following = value.narrow(1, 1, steps)
    if truncated is None:
        return following
    truncated = truncated.narrow(1, 0, steps)
    is_cut = truncated if truncated.dtype == torch.bool else truncated != 0
    return torch.where(is_cut, (value if final is None else final).narrow(1, 0, steps), following)
