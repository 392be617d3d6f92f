"""EmbodiChain's functions that read a rollout `[N, T + 1]`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorDict

from relive.compat.seeding import choose_seed, make_generator
from relive.schema.assembly import make_tensordict, to_device
from relive.schema.checks import check_positive_int
from relive.schema.conversion import as_device

__all__ = ["iterate_minibatches", "transition_view"]


def transition_view(rollout: TensorDict, flatten: bool = False) -> TensorDict:
    """Return the transitions `[N, T]` of a rollout `[N, T + 1]`; `flatten` gives `[N · T]`, environment by environment.

    Every field is returned without its last slot; "next_value", the value of the state after each step, is added.
    Fields share the rollout's memory unless `flatten`, which copies.
    """
    fields: dict[str, Any] = dict(rollout.items())
    next_value = read_next_values(fields)
    if not all(type(field) is torch.Tensor for field in fields.values()):
        transitions = rollout[:, :-1]
        transitions["next_value"] = next_value
        return transitions.reshape(-1) if flatten else transitions
    steps = next_value.shape[1]
    leaves = {name: field.narrow(1, 0, steps) for name, field in fields.items()}
    leaves["next_value"] = next_value
    if flatten:
        leaves = {name: leaf.flatten(0, 1) for name, leaf in leaves.items()}
    return make_tensordict(leaves, leaves["next_value"].shape, rollout.device)


def iterate_minibatches(
    rollout: TensorDict, batch_size: int, device: torch.device | str, *, seed: int | None = None
) -> Iterator[TensorDict]:
    """Yield every row of a flat rollout `[B]` once, shuffled, in batches on `device`; the last one may be shorter.

    Without a `seed`, all epochs of a rollout use one generator.
    """
    check_positive_int("batch_size", batch_size)
    first: Any = next(iter(rollout.values(True, True)))
    target_device, source_device = as_device(device), first.device
    generator = _get_epoch_generator(rollout, source_device) if seed is None else make_generator(source_device, seed)
    order = torch.randperm(len(rollout), generator=generator, device=source_device)
    batches = _read_row_batches(rollout, order.split(batch_size))
    return batches if source_device == target_device else (to_device(batch, target_device) for batch in batches)


_generators: dict[int, tuple[int, torch.Generator]] = {}
"""Seed and generator of each rollout that exists, by the `id()` of the rollout."""


def _get_epoch_generator(rollout: TensorDict, device: torch.device) -> torch.Generator:
    """Return the generator of a rollout's epochs; it is a new one if torch's generator has changed since."""
    seed, key = choose_seed(), id(rollout)
    if key not in _generators:
        weakref.finalize(rollout, _generators.pop, key, None).atexit = False
    if key not in _generators or _generators[key][0] != seed:
        _generators[key] = seed, make_generator(device, seed)
    return _generators[key][1]


def _read_row_batches(rollout: TensorDict, indices: Iterable[torch.Tensor]) -> Iterator[TensorDict]:
    fields: dict[str, Any] = dict(rollout.items())
    if not all(type(field) is torch.Tensor for field in fields.values()):
        return (rollout[index] for index in indices)
    device = rollout.device
    return (
        make_tensordict({name: x.index_select(0, index) for name, x in fields.items()}, index.shape, device)
        for index in indices
    )


def read_next_values(fields: Mapping[str, Any]) -> torch.Tensor:
    """Return the values [N, T] of the states after each step: "value" of the next slot, except for truncated steps.

    The next slot of a truncated step belongs to the next episode, so its "final_value" or its own "value" is returned.
    """
    value, truncated, final = fields["value"], fields.get("truncated"), fields.get("final_value")
    steps = value.shape[1] - 1
    following = value.narrow(1, 1, steps)
    if truncated is None:
        return following
    truncated = truncated.narrow(1, 0, steps)
    is_truncated = truncated if truncated.dtype == torch.bool else truncated != 0
    return torch.where(is_truncated, (value if final is None else final).narrow(1, 0, steps), following)
