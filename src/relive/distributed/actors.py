"""The processes of a service: starting them, and finding them by the service's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

import relive
from relive.distributed.plan import Plan, difference, plain_arguments
from relive.distributed.shard import Shard
from relive.errors import IncompatibleService, SchemaError, ShardUnavailable, explain

NAMESPACE = "relive"
"""The Ray namespace of all services, so that every job of the cluster finds them."""


def start_actors(service: str, plan: Plan, options: Mapping[str, Any]) -> list[Any]:
    """Start one process per shard."""
    if not isinstance(service, str) or not service:
        raise SchemaError(explain("name", "a str that is not empty", repr(service), "Pass a name for the service."))
    settings = {
        "namespace": NAMESPACE,
        "max_restarts": 0 if plan.checkpoint is None else -1,
        "num_cpus": 0,
        "scheduling_strategy": "SPREAD",
        **options,
    }
    remote = ray.remote(Shard)
    actors: list[Any] = []
    try:
        for shard in range(plan.num_shards):
            actors.append(remote.options(name=_actor_name(service, shard), **settings).remote(plan, shard))
    except ValueError:
        for actor in actors:
            ray.kill(actor)
        remedy = "Connect to it with ReplayService.connect, close it, or choose another name."
        raise SchemaError(explain("name", "a name not in use", repr(service), remedy)) from None
    return actors


def find_actor(service: str, shard: int) -> Any:
    """The process of a shard, by the name of its service."""
    try:
        return ray.get_actor(_actor_name(service, shard), namespace=NAMESPACE)
    except ValueError:
        remedy = "Start the service, or check its name; its driver may have ended."
        where = f"shard {shard} of {service!r}"
        raise ShardUnavailable(
            explain(where, "a process in this cluster", "no such process", remedy), retry=True
        ) from None


def _actor_name(service: str, shard: int) -> str:
    return f"{service}/{shard}"


def require_compatible(service: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise unless a service has this version of relive and the arguments that its client expects."""
    wanted = {"relive": relive.__version__, **plain_arguments(expected)}
    differs = difference(wanted, {key: found.get(key) for key in wanted})
    if differs:
        where = f"service {service!r}"
        remedy = "Connect with the settings of the service, and with its version of relive."
        raise IncompatibleService(
            explain(where, "the settings of the client (client against service)", differs, remedy)
        )
