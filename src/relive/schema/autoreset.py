"""Autoreset modes of environments, and the lookup of final observations in `info`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from relive.errors import SchemaError, explain, warn_user
from relive.schema.conversion import (
    as_indexable,
    as_numpy_if_cpu,
    as_tensor,
    convert,
    convert_leaves,
    refuse_reused_leaves,
)
from relive.schema.fields import FLAG_FIELD, NUMBER_FIELD, Declaration, Field, Schema, Tree, declare_fields

_HOST = torch.device("cpu")
_FINAL_KEYS = ("final_obs", "final_observation")
"""Keys of `info` with the final observations of SAME_STEP environments; older environments use the second key."""


def parse_autoreset_mode(mode: Any) -> AutoresetMode | None:
    """Return the AutoresetMode for a mode, its name or its value; None stays None."""
    if mode is None or isinstance(mode, AutoresetMode):
        return mode
    for member in AutoresetMode:
        if isinstance(mode, str) and mode.upper() in (member.name, member.value.upper()):
            return member
    expected = ", ".join(f"AutoresetMode.{member.name}" for member in AutoresetMode)
    raise SchemaError(explain("autoreset", f"one of {expected} or None", repr(mode), "Pass the environment's mode."))


def find_autoreset_mode(env: Any) -> AutoresetMode:
    """Return the autoreset mode of an environment; DISABLED for a single environment without an Autoreset wrapper."""
    if is_vector_env(env):
        mode = parse_autoreset_mode((getattr(env, "metadata", None) or {}).get("autoreset_mode"))
        if mode is None:
            expected = 'metadata["autoreset_mode"] in the vector environment'
            remedy = "Pass autoreset= to say how the environment resets: NEXT_STEP, SAME_STEP or DISABLED."
            raise SchemaError(explain("autoreset", expected, None, remedy))
        return mode
    while isinstance(env, gym.Wrapper):
        if isinstance(env, gym.wrappers.Autoreset):
            return AutoresetMode.NEXT_STEP
        env = env.env
    return AutoresetMode.DISABLED


class EnvSettings(NamedTuple):
    """Arguments of a buffer that an environment determines."""

    obs: Declaration
    action: Declaration
    num_envs: int | None
    autoreset: AutoresetMode | str


def read_env_settings(
    env: Any, obs: Declaration | None, action: Declaration | None, autoreset: AutoresetMode | str | None
) -> EnvSettings:
    """Read the settings of a buffer from a Gymnasium environment; arguments that are not None take precedence."""
    if not hasattr(env, "observation_space"):
        raise SchemaError(explain("for_env", "an environment", repr(env), "Pass gym.make(…) or gym.make_vec(…)."))
    has_many_envs = is_vector_env(env)
    return EnvSettings(
        obs=obs if obs is not None else env.single_observation_space if has_many_envs else env.observation_space,
        action=action if action is not None else env.single_action_space if has_many_envs else env.action_space,
        num_envs=env.num_envs if has_many_envs else None,
        autoreset=find_autoreset_mode(env) if autoreset is None else autoreset,
    )


def warn_of_frame_stacks(env: Any) -> None:
    """Warn if an environment stacks frames itself: a replay buffer would store every frame once per stack."""
    inner: Any = env.envs[0] if is_vector_env(env) and getattr(env, "envs", None) else env
    space = getattr(inner, "observation_space", None)
    while isinstance(inner, gym.Wrapper) and not isinstance(inner, gym.wrappers.FrameStackObservation):
        inner = inner.env
    is_visible = isinstance(inner, gym.wrappers.FrameStackObservation) and inner.observation_space is space
    if not is_visible or inner.stack_size < 2 or inner.padding_type not in ("reset", "zero"):
        return
    stack = declare_fields("obs", space)
    if isinstance(stack, Field):
        pad = "repeat" if inner.padding_type == "reset" else "zero"
        frame = f"rl.Field({stack.shape[1:]}, {stack.dtype})"
        remedy = f"Pass obs=rl.Stacked({frame}, {inner.stack_size}, axis=0, pad={pad!r})."
        got = f"FrameStackObservation, which stores each {inner.stack_size} times"
        warn_user(explain("for_env", "frames that are stored once", got, remedy))


def unpack_step(step: Any, mode: AutoresetMode | None) -> tuple[Any, Any, Any, Any, Mapping[str, Any]]:
    """Return the 5-tuple of `env.step`; raise if `step` is no 5-tuple or the autoreset mode is unknown."""
    if mode is None:
        remedy = "Pass autoreset= to the buffer: NEXT_STEP, SAME_STEP or DISABLED."
        raise SchemaError(explain("autoreset", "the environment's autoreset mode, which add_step needs", None, remedy))
    if not isinstance(step, tuple) or len(step) != 5:
        got = f"{type(step).__name__} of length {len(step)}" if isinstance(step, Sequence) else type(step).__name__
        raise SchemaError(explain("step", "the 5-tuple of env.step", got, "Pass step=env.step(action)."))
    return step


class AutoresetModeChecker:
    """Declared autoreset mode, with one warning if the `info` of a step contradicts the mode."""

    def __init__(self, mode: AutoresetMode | None) -> None:
        self._mode = mode
        self.is_watching = mode in (AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED)

    def check_info(self, info: Mapping[str, Any]) -> None:
        """Check the info of a step before it is stored; call it only while `is_watching`."""
        key = next((key for key in _FINAL_KEYS if key in info), None)
        if key is not None and self._mode is not None:
            self.is_watching = False
            remedy = (
                "The environment resets in the step that ends an episode: declare autoreset=SAME_STEP, or first steps "
                "of episodes are lost (NEXT_STEP) and reset observations are taken for final ones (DISABLED)."
            )
            expected = f"no final observations under autoreset={self._mode.name}"
            warn_user(explain("autoreset", expected, f"info[{key!r}]", remedy))


def refuse_reused_obs(schema: Schema, obs: Any, next_obs: Any) -> None:
    """Raise if `obs` and `next_obs` share memory: the environment has overwritten `obs` in its step."""
    if obs is not None:
        refuse_reused_leaves(schema, schema.flatten("obs", obs), schema.flatten("obs", next_obs))


def read_transition(
    step: Any,
    mode: AutoresetMode | None,
    schema: Schema,
    leading_shape: tuple[int, ...],
    device: torch.device,
    obs: Any = None,
) -> tuple[tuple[Any, ...], Any, Any, Any]:
    """Return the leaves of the true next observation, before any reset, and reward, terminated and truncated.

    Final observations replace the observations of environments that were reset. The result is then a copy, so memory
    that `next_obs` shares with `obs` is refused here.
    """
    next_obs, reward, terminated, truncated, info = unpack_step(step, mode)
    leaves = schema.flatten("obs", next_obs)
    if mode is not AutoresetMode.SAME_STEP:
        return leaves, reward, terminated, truncated
    ends = np.logical_or(*flags_to_host({"terminated": terminated, "truncated": truncated}, leading_shape, device))
    envs = ends.nonzero()[0].tolist()
    if not envs:
        return leaves, reward, terminated, truncated
    refuse_reused_obs(schema, obs, next_obs)
    final_envs, finals = find_final_obs(info, envs, schema, leading_shape, device)
    if len(final_envs) < len(envs):
        missing_env = next(env for env in envs if env not in final_envs)
        remedy = "Make the environment provide it, or pass the true next_obs to add."
        expected, got = f"an observation for environment {missing_env}", f"observations for environments {final_envs}"
        raise SchemaError(explain('info["final_obs"]', expected, got, remedy))
    next_leaves = [
        leaf.clone() for leaf in convert_leaves(schema, "obs", next_obs, leading_shape, device, prefix="next_")
    ]
    for leaf, final in zip(next_leaves, finals, strict=True):
        as_numpy_if_cpu(as_indexable(leaf))[final_envs if leading_shape else ...] = as_numpy_if_cpu(as_indexable(final))
    return tuple(next_leaves), reward, terminated, truncated


def flags_to_host(flags: Mapping[str, Any], leading_shape: tuple[int, ...], device: torch.device) -> list[np.ndarray]:
    """Return the flags of a step as arrays [N] on the host; a tensor on another device is waited for."""
    arrays: list[np.ndarray] = []
    for name, flag in flags.items():
        if type(flag) is np.ndarray and flag.dtype == np.bool_ and flag.shape == leading_shape != ():
            arrays.append(flag)
        elif not leading_shape and (flag is True or flag is False):
            arrays.append(np.array([flag]))
        else:
            flag_device = device if isinstance(flag, torch.Tensor) else _HOST
            arrays.append(convert(name, FLAG_FIELD, flag, leading_shape, flag_device).view(-1).cpu().numpy())
    return arrays


def is_vector_env(env: Any) -> bool:
    """Whether `env` steps several environments at once."""
    return hasattr(env, "single_observation_space")


def find_final_obs(
    info: Mapping[str, Any], envs: list[int], schema: Schema, leading_shape: tuple[int, ...], device: torch.device
) -> tuple[list[int], list[torch.Tensor]]:
    """Look up the final observations of `envs` in `info`; return the K environments found, and leaves [K, …].

    Two layouts are supported: an object array with an observation (array, dict or tuple) or None per environment, and
    a batched array or dict with the mask `_final_obs` of valid rows.
    """
    info = info or {}
    key = next((key for key in _FINAL_KEYS if key in info), None)
    if key is None:
        return [], []
    finals = _remove_entry_masks(info[key], schema.trees["obs"])
    final_envs = envs
    if leading_shape and (mask := info.get(f"_{key}")) is not None:
        mask_device = mask.device if isinstance(mask, torch.Tensor) and mask.device.type != "meta" else device
        flags = as_tensor(f"info: _{key}", mask, mask_device).tolist()
        final_envs = [env for env in envs if env < len(flags) and flags[env]]
    if leading_shape and _is_per_environment(finals):
        final_obs_by_env = {env: _select_env(finals, env) for env in final_envs}
        final_envs = [env for env in final_envs if final_obs_by_env[env] is not None]
        leaves = [
            convert_leaves(schema, "obs", final_obs_by_env[env], (), device, prefix="final_") for env in final_envs
        ]
        return final_envs, [torch.stack(group) for group in zip(*leaves, strict=True)]
    if not final_envs:
        return [], []
    rows = final_envs if leading_shape else None
    return final_envs, convert_leaves(schema, "obs", finals, leading_shape, device, rows, prefix="final_")


def read_info_numbers(
    info: Mapping[str, Any], name: str, leading_shape: tuple[int, ...], device: torch.device, mode: AutoresetMode | None
) -> torch.Tensor | None:
    """Return the numbers `info[name]`, float64 [N], 0 for environments without one; None without any.

    SAME_STEP environments store the info of an episode's last step in "final_info": a dict like the info, or an object
    array with a dict or None per environment. Other entries of the info then belong to the reset observation.
    """
    numbers = _read_numbers(info, name, leading_shape, device)
    finals = info.get("final_info") if mode is AutoresetMode.SAME_STEP else None
    if finals is None:
        return numbers
    if isinstance(finals, Mapping):
        ended = info.get("_final_info", np.ones(leading_shape, dtype=np.bool_))
    else:
        ended = [env_info is not None for env_info in finals]
        finals = {name: [(env_info or {}).get(name) for env_info in finals]}
    last = _read_numbers(finals, name, leading_shape, device)
    if numbers is None and last is None:
        return None
    zeros = torch.zeros(leading_shape, dtype=torch.float64, device=device)
    flags = convert('info["_final_info"]', FLAG_FIELD, ended, leading_shape, device)
    return torch.where(flags, zeros if last is None else last, zeros if numbers is None else numbers)


def _read_numbers(
    info: Mapping[str, Any], name: str, leading_shape: tuple[int, ...], device: torch.device
) -> torch.Tensor | None:
    value = info.get(name)
    if value is None:
        return None
    if isinstance(value, list) or (isinstance(value, np.ndarray) and value.dtype == object):
        value = [0.0 if entry is None else entry for entry in value]
    numbers = convert(f"info[{name!r}]", NUMBER_FIELD, value, leading_shape, device)
    mask = info.get(f"_{name}")
    if mask is None:
        return numbers
    return numbers.where(convert(f"info['_{name}']", FLAG_FIELD, mask, leading_shape, device), 0.0)


def _remove_entry_masks(finals: Any, tree: Tree) -> Any:
    """Remove the masks of single entries of a batched dict: the mask of the whole dict is read instead."""
    if not isinstance(finals, Mapping) or not isinstance(tree, dict):
        return finals
    return {key: _remove_entry_masks(finals[key], tree[key]) if key in tree else finals[key]
            for key in finals if key in tree or not key.startswith("_")}  # fmt: skip


def _select_env(finals: Any, env: int) -> Any:
    if isinstance(finals, Mapping):
        parts = {key: _select_env(value, env) for key, value in finals.items()}
        return None if any(part is None for part in parts.values()) else parts
    return finals[env] if env < len(finals) else None


def _is_per_environment(finals: Any) -> bool:
    if isinstance(finals, Mapping):
        return any(map(_is_per_environment, finals.values()))
    return isinstance(finals, list) or (isinstance(finals, np.ndarray) and finals.dtype == object)
