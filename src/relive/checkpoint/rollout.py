"""A rollout buffer in the words of a checkpoint. All of it is written every time: a rollout is thrown away anyhow."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium.vector import AutoresetMode

from relive.checkpoint.contents import (
    Contents,
)
from relive.errors import IncompatibleCheckpoint, explain
from relive.fields.buffer_schemas import OPTIONAL
from relive.fields.conversion import light
from relive.fields.declarations import device_of, path_of, tree_of
from relive.memory.documents import Node
from relive.memory.rows import Rows
from relive.memory.saved import Arrays, Saved, State
from relive.rollout.buffer import RolloutBuffer
from relive.rollout.finals import Found
from relive.statistics.observers import observers_of

_OWN = ("obs", "action", "reward", "value", "terminated", "truncated")


def config(rollout: RolloutBuffer) -> dict[str, Any]:
    """How an equal, empty buffer is made."""
    trees = rollout._schema.config()
    return {
        "num_steps": rollout.num_steps,
        "num_envs": rollout.num_envs,
        **{name: trees[name] for name in ("obs", "action", "reward", "value")},
        "extra": {name: tree for name, tree in trees.items() if name not in _OWN},
        "autoreset": None if rollout.autoreset is None else rollout.autoreset.name,
        "device": str(rollout.device),
        "listeners": rollout._listeners.config(),
    }


def state(rollout: RolloutBuffer) -> State:
    """Everything that changes."""
    found = Contents("RolloutBuffer", {})
    stored = rollout.num_stored
    arrays = columns(rollout)
    attached = enumerate(rollout._attached.items())
    arrays |= {f"attached{i}": leaf for i, (path, leaf) in attached if path not in rollout._schema.paths}
    given = [name for name in OPTIONAL if stored and name not in rollout._columns.missing]
    values = {
        "num_stored": stored,
        "valued": stored if "value" in given else 0,
        "given": given,
        "staged": sorted(rollout._staged),
        "attached": [list(path) for path in rollout._attached],
    }
    found.take("rows", (values, arrays))
    flags = {
        "resetting": rollout._resets.resetting,
        "starting": rollout._resets.starting,
        "coming": torch.as_tensor(rollout._coming),
    }
    found.take("flags", ({}, flags))
    found.take("finals", _finals_state(rollout))
    found.take("last", _last_state(rollout))
    found.take("carries", ({}, rollout._carries.saved()))
    found.take("random", rollout._random.state())
    found.take("listeners", rollout._listeners.state())
    return State(found.values, found.arrays)


def columns(rollout: RolloutBuffer) -> dict[str, torch.Tensor]:
    """Its rows are part of the state."""
    return {f"column{i}": column for i, column in enumerate(rollout._storage.columns)}


def rows(rollout: RolloutBuffer) -> Rows | None:
    """None of them are written once for ever."""
    return None


def _finals_state(rollout: RolloutBuffer) -> tuple[dict[str, Any], Arrays]:
    finals = rollout._finals
    leaves = [torch.cat(parts) for parts in zip(*(found.leaves for found in finals._found), strict=True)]
    places = torch.tensor(finals.places, dtype=torch.int64).view(-1, 2)
    return {}, {"places": places, **{f"leaf{i}": leaf for i, leaf in enumerate(leaves)}}


def _last_state(rollout: RolloutBuffer) -> tuple[dict[str, Any], Arrays]:
    value, obs = rollout._last or (None, None)
    arrays = {f"value{i}": leaf for i, leaf in enumerate(value or ())}
    arrays |= {f"obs{i}": leaf for i, leaf in enumerate(obs or ())}
    return {"value": value is not None, "obs": obs is not None}, arrays


def from_config(config: Node, read: Saved, **options: Any) -> RolloutBuffer:
    """An empty buffer as the one that was saved, but for what `options` change."""
    if options.get("capacity") is not None:
        remedy = "Leave capacity= out, or make a new buffer: a rollout is collected anew anyway."
        raise IncompatibleCheckpoint(explain("capacity", "no capacity= for a rollout", options["capacity"], remedy))
    if options.get("device") != "meta":
        for name, column in columns(from_config(config, read, device="meta")).items():
            read.require_form(f"rows.{name}", tuple(column.shape), column.dtype)
    num_envs, autoreset = config.entry("num_envs").optional(), config.entry("autoreset").optional()
    envs = None if num_envs is None else num_envs.integer(1, 1 << 40)
    mode = None if autoreset is None else AutoresetMode[autoreset.one_of(AutoresetMode.__members__)]
    return RolloutBuffer(
        config.entry("num_steps").integer(1, 1 << 50),
        envs,
        *(tree_of(config.entry(name)) for name in ("obs", "action")),  # pyright: ignore[reportArgumentType]
        reward=tree_of(config.entry("reward")),
        value=tree_of(config.entry("value")),
        extra={name: tree_of(tree) for name, tree in config.entry("extra").entries().items()},
        autoreset=mode,
        device=options.get("device") or device_of(config.entry("device")),
        **observers_of(config.entry("listeners"), read.part_without_values("listeners"), envs),
    )


def load_state(rollout: RolloutBuffer, read: Saved) -> None:
    """Fill everything."""
    node = read.values.entry("rows")
    stored = node.entry("num_stored").integer(0, rollout.num_steps)
    read.part("rows").copy_into(columns(rollout))
    read.part("flags").copy_into({"resetting": rollout._resets.resetting, "starting": rollout._resets.starting})
    rollout._empty()
    coming = read.array("flags.coming", rollout._resets.resetting.unsqueeze(0))
    rollout._coming = light(coming.to(rollout.device))
    rollout._num_stored = stored
    given = _given(rollout, read, stored)
    rollout._expect(**{name: name in given for name in OPTIONAL})
    rollout._staged.update(_declared(rollout, name) for name in node.entry("staged").items(1 << 10))
    stored_columns = dict(zip(rollout._schema.paths, rollout._storage.columns, strict=True))
    for i, node_of_path in enumerate(node.entry("attached").items(1 << 10)):
        path = path_of(node_of_path)
        if path[0] in rollout._columns.given:
            raise node_of_path.wrong("a name of its own")
        column = stored_columns.get(path)  # an optional field: its rows have been read with all others
        if column is None:
            column = _attached(rollout, read, f"rows.attached{i}")
        rollout._attached[path] = column
    _restore_finals(rollout, read)
    _restore_last(rollout, read)
    try:
        rollout._carries.resume(read.part("carries").tensors(_most_carried(rollout)))
    except ValueError as error:
        raise Node("state: carries", str(error)).wrong("hidden states of the rollout") from None
    rollout._random.load_state(read.part("random"))
    rollout._listeners.load_state(read.part_without_values("listeners"))


def _given(rollout: RolloutBuffer, read: Saved, stored: int) -> set[str]:
    """Which optional fields the steps gave."""
    node = read.values.entry("rows")
    if "given" in node.entries():
        return {name.one_of(OPTIONAL) for name in node.entry("given").items(len(OPTIONAL))}
    # An older checkpoint counts the steps that had a value, and says nothing of log_prob: zeros were not given.
    columns = (read.tensor(f"rows.column{i}")[:stored] for i in rollout._schema.columns["log_prob"])
    found = {"log_prob"} if any(bool((column != 0).any()) for column in columns) else set()
    return found | ({"value"} if node.entry("valued").integer(0, stored) == stored else set())


def _declared(rollout: RolloutBuffer, name: Node) -> str:
    if name.text() not in rollout._schema.columns:
        raise name.wrong("a declared field")
    return name.value


def _attached(rollout: RolloutBuffer, read: Saved, name: str) -> torch.Tensor:
    read.require(name, (rollout.num_steps + 1, rollout.num_envs or 1))
    return read.tensor(name).to(rollout.device)


def _most_carried(rollout: RolloutBuffer) -> int:
    """The bytes of the hidden states of every step."""
    steps = (rollout.num_steps + 1) * (rollout.num_envs or 1)
    return steps * sum(x.element_size() * x.shape[1:].numel() for x in rollout._carries.saved().values())


def _restore_finals(rollout: RolloutBuffer, read: Saved) -> None:
    most = rollout._num_stored * (rollout.num_envs or 1)
    places = read.shaped("finals.places", (range(most + 1), 2), torch.int64).tolist()
    if not places:
        return
    fields = [rollout._schema.fields[i] for i in rollout._schema.columns["obs"]]
    leaves = [
        read.shaped(f"finals.leaf{j}", (len(places), *field.shape), field.dtype).to(rollout.device)
        for j, field in enumerate(fields)
    ]
    for i, (step, env) in enumerate(places):
        if not (0 <= step < rollout._num_stored and 0 <= env < (rollout.num_envs or 1)):
            raise Node("state: finals.places", [step, env]).wrong("a stored step and its environment")
        rollout._finals.keep(Found(step, [env], [leaf[i : i + 1] for leaf in leaves]))


def _restore_last(rollout: RolloutBuffer, read: Saved) -> None:
    node = read.values.entry("last")
    if not node.entry("value").flag():
        return
    schema, lead = rollout._schema, rollout._storage.lead

    def leaves(name: str) -> list[torch.Tensor]:
        fields = [schema.fields[i] for i in schema.columns[name]]
        return [
            read.shaped(f"last.{name}{i}", (*lead, *field.shape), field.dtype).to(rollout.device)
            for i, field in enumerate(fields)
        ]

    rollout._last = leaves("value"), leaves("obs") if node.entry("obs").flag() else None
