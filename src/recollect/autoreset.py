"""How an environment starts again after an end, and where the true final observation then is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from recollect.border import conform, dotted
from recollect.errors import SchemaError, explain
from recollect.schema import Field, Schema, given_shape

_FLAG = Field((), torch.bool)

FINAL_KEYS = ("final_obs", "final_observation")
"""Where SAME_STEP environments put the observation before the reset; the second is the older name."""


def parse_autoreset(mode: Any) -> AutoresetMode | None:
    """An AutoresetMode, its name or its value; None says that the buffer is told everything."""
    if mode is None or isinstance(mode, AutoresetMode):
        return mode
    for known in AutoresetMode:
        if isinstance(mode, str) and mode.upper() in (known.name, known.value.upper()):
            return known
    expected = ", ".join(f"AutoresetMode.{known.name}" for known in AutoresetMode)
    raise SchemaError(explain("autoreset", f"one of {expected} or None", repr(mode), "Pass the environment's mode."))


def autoreset_of(env: Any) -> AutoresetMode:
    """The mode of a Gymnasium environment; a single one is reset by its user unless a wrapper does it."""
    if is_vector(env):
        mode = (getattr(env, "metadata", None) or {}).get("autoreset_mode")
        if mode is None:
            raise SchemaError(
                explain(
                    "autoreset",
                    'metadata["autoreset_mode"] of the vector environment',
                    "none",
                    "Pass autoreset= to say how it resets: NEXT_STEP, SAME_STEP or DISABLED.",
                )
            )
        return parse_autoreset(mode)  # type: ignore[return-value]
    while isinstance(env, gym.Wrapper):
        if isinstance(env, gym.wrappers.Autoreset):
            return AutoresetMode.NEXT_STEP
        env = env.env
    return AutoresetMode.DISABLED


def settings_of(env: Any, options: dict[str, Any]) -> dict[str, Any]:
    """What a Gymnasium environment says about its buffer, where `options` do not say otherwise."""
    vector = is_vector(env)
    known = {
        "obs": env.single_observation_space if vector else env.observation_space,
        "action": env.single_action_space if vector else env.action_space,
        "num_envs": env.num_envs if vector else None,
    }
    mode = options.get("autoreset")
    return {**known, **options, "autoreset": autoreset_of(env) if mode is None else mode}


def unpack_step(step: Any, mode: AutoresetMode | None) -> tuple[Any, Any, Any, Any, Mapping[str, Any]]:
    """The five parts of what `env.step` returned, for a buffer that knows how the environment resets."""
    if mode is None:
        remedy = "Pass autoreset= to the buffer: NEXT_STEP, SAME_STEP or DISABLED."
        raise SchemaError(explain("autoreset", "the environment's mode for add_step", None, remedy))
    if not isinstance(step, tuple) or len(step) != 5:
        got = f"{type(step).__name__} of length {len(step)}" if isinstance(step, Sequence) else type(step).__name__
        raise SchemaError(explain("step", "the 5-tuple of env.step", got, "Pass step=env.step(action)."))
    return step


def true_next_obs(
    step: Any, mode: AutoresetMode | None, schema: Schema, lead: tuple[int, ...], device: torch.device
) -> tuple[tuple[Any, ...], Any, Any, Any]:
    """The leaves of the state that each step led to before any reset, and the step's reward and flags."""
    next_obs, reward, terminated, truncated, info = unpack_step(step, mode)
    leaves = schema.flatten("obs", next_obs)
    if mode is not AutoresetMode.SAME_STEP:
        return leaves, reward, terminated, truncated
    flags = (
        conform(name, _FLAG, flag, lead, device)
        for name, flag in (("terminated", terminated), ("truncated", truncated))
    )
    ended = torch.stack(list(flags)).any(0)
    if not ended.any():
        return leaves, reward, terminated, truncated
    envs = ended.nonzero().squeeze(1).tolist() if lead else [0]
    known, finals = final_rows(info, envs, schema, lead, device)
    if len(known) < len(envs):
        missing = next(env for env in envs if env not in known)
        remedy = "Let the environment give it, or pass the true next_obs to add."
        raise SchemaError(
            explain('info["final_obs"]', f"the final observation of environment {missing}", "none", remedy)
        )
    fixed = [leaf.clone() for leaf in observation(schema, next_obs, lead, device, prefix="next_")]
    at = torch.tensor(known, device=device)
    for leaf, final in zip(fixed, finals, strict=True):
        leaf[at if lead else ...] = final if lead else final[0]
    return tuple(fixed), reward, terminated, truncated


def is_vector(env: Any) -> bool:
    """Whether `env` steps several environments at once."""
    return hasattr(env, "single_observation_space")


def final_rows(
    info: Mapping[str, Any], envs: list[int], schema: Schema, lead: tuple[int, ...], device: torch.device
) -> tuple[list[int], list[torch.Tensor]]:
    """The final observations that `info` holds of the environments `envs`: which of them, and their leaves [K, …].

    Met in the wild: an object array of one observation (array, dict or tuple) or None for each environment, and a
    batched array or dict whose rows are valid where the mask `_final_obs` is true.
    """
    key = next((key for key in FINAL_KEYS if key in info), None)
    if key is None:
        return [], []
    finals, mask = info[key], info.get(f"_{key}")
    known = [env for env in envs if mask is None or bool(np.asarray(mask)[env])] if lead else envs
    if _is_per_environment(finals):
        known = [env for env in known if finals[env] is not None]
        each = [observation(schema, finals[env], (), device) for env in known]
        return known, [torch.stack(leaves) for leaves in zip(*each, strict=True)]
    return known, rows_of(observation(schema, finals, lead, device), known, lead) if known else []


def rows_of(leaves: list[torch.Tensor], envs: list[int], lead: tuple[int, ...]) -> list[torch.Tensor]:
    """Copies of the rows `envs` of an observation of all environments."""
    if not lead:
        return [leaf.unsqueeze(0).clone() for leaf in leaves]
    return [leaf[torch.tensor(envs, device=leaf.device)] for leaf in leaves]


def _is_per_environment(finals: Any) -> bool:
    return isinstance(finals, list) or (isinstance(finals, np.ndarray) and finals.dtype == object)


def observation(
    schema: Schema, value: Any, lead: tuple[int, ...], device: torch.device, prefix: str = "final_"
) -> list[torch.Tensor]:
    """The leaves of an observation that no field is declared for, checked as any observation is."""
    return [
        conform(prefix + dotted(schema.paths[i]), _whole(schema.fields[i]), leaf, lead, device)
        for i, leaf in zip(schema.columns["obs"], schema.flatten("obs", value), strict=True)
    ]


def _whole(field: Field) -> Field:
    return Field(given_shape(field), field.dtype)
