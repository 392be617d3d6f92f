"""A writer that collects an actor's single steps and sends them to a service in blocks."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from relive.distributed.sender import Sender
from relive.fields.autoreset import parse_autoreset, true_next_obs
from relive.fields.checks import positive, same_keys
from relive.fields.schema import Schema, caller_shape

if TYPE_CHECKING:
    from relive.distributed.service import ReplayService

_HOST = torch.device("cpu")


class Writer:
    """Collects steps of some environments and sends them to a service in blocks; `ReplayService.writer` makes one.

    A full block is sent when the next step comes, so that a call that raises has not taken its step and may be
    repeated. The end of a `with` block sends the remaining steps and waits until the service has them.

    Args:
        service: the service.
        sender: the sender of the service's client.
        envs: the environments of this writer [k].
        block: the number of steps that are sent together.
    """

    def __init__(self, service: ReplayService, sender: Sender, envs: torch.Tensor, block: int) -> None:
        self._service, self._sender, self._envs, self._count = service, sender, envs, 0
        self._schema: Schema = service.plan.schema
        self._autoreset = parse_autoreset(service.plan.autoreset)
        shapes = [(positive("block", block), len(envs), *caller_shape(field)) for field in self._schema.fields]
        self._leaves = [
            torch.empty(s, dtype=f.dtype, device="cpu") for s, f in zip(shapes, self._schema.fields, strict=True)
        ]
        self._nexts = [torch.empty_like(self._leaves[i]) for i in self._schema.leaf_indices["obs"]]

    def add(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        terminated: Any,
        truncated: Any,
        next_obs: Any,
        **extra: Any,
    ) -> None:
        """Take one step of every environment of this writer."""
        self._take((obs, action, reward, terminated, truncated), self._schema.flatten("obs", next_obs), extra)

    def add_step(self, obs: Any, action: Any, step: tuple[Any, Any, Any, Any, Mapping[str, Any]], **extra: Any) -> None:
        """Take one step as Gymnasium returns it: `step = env.step(action)`, after the observation `obs`."""
        lead = (len(self._envs),)
        nexts, *rest = true_next_obs(step, self._autoreset, self._schema, lead, _HOST)
        self._take((obs, action, *rest), nexts, extra)

    def _take(self, values: tuple[Any, ...], nexts: tuple[Any, ...], extra: Mapping[str, Any]) -> None:
        schema = self._schema
        names = schema.names[len(values) :]
        same_keys("add", extra, names, "further fields")
        given = (*values, *(extra[name] for name in names))
        leaves = [leaf for name, value in zip(schema.names, given, strict=True) for leaf in schema.flatten(name, value)]
        convert, lead = self._service.plan.convert, (len(self._envs),)
        converted = [convert(i, leaf, lead) for i, leaf in enumerate(leaves)]
        following = [convert(i, leaf, lead, "next_") for i, leaf in zip(schema.leaf_indices["obs"], nexts, strict=True)]
        if self._count == len(self._leaves[0]):
            self._push()
        for block, leaf in zip((*self._leaves, *self._nexts), (*converted, *following), strict=True):
            block[self._count] = leaf
        self._count += 1

    def cut(self) -> None:
        """End the current episodes, which were abandoned: the next observations start new ones."""
        self._push()
        self._service.cut(self._envs)

    def flush(self) -> None:
        """Send the remaining steps, and wait until the service has them."""
        self._push()
        self._service.flush()

    def _push(self) -> None:
        if self._count:
            count = self._count
            leaves, nexts = ([leaf[:count] for leaf in part] for part in (self._leaves, self._nexts))
            self._sender.push(leaves, nexts, self._envs)
            self._count = 0

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if kind is None:
            self.flush()
