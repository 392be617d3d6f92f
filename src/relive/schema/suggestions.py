"""Suggestions in error messages: our name for a keyword, method or field of another library."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NoReturn, ParamSpec, TypeVar

from relive.errors import explain

NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
"""Valid names of fields and arrays in files."""

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=type)

_KEYWORD_NAMES: Mapping[str, tuple[str, ...]] = {
    "num_envs": ("n_envs", "n_env", "num_env", "nenvs", "num_processes", "num_actors", "env_num"),
    "capacity": ("buffer_size", "max_size", "maxlen", "max_len", "memory_size", "replay_size", "size"),
    "num_steps": (
        "n_steps", "buffer_size", "memory_size", "horizon", "rollout_length", "num_transitions_per_env",
        "num_steps_per_env", "max_size", "capacity",
    ),
    "gamma": ("discount", "discount_factor", "gamma_"),
    "length": ("seq_len", "seq_length", "sequence_length", "slice_len", "unroll_length"),
    "n": ("n_step", "n_steps", "nstep", "num_steps", "steps"),
    "burn_in": ("burnin", "burn_in_length", "warmup"),
    "obs": (
        "observation", "observations", "observation_space", "observation_spec", "obs_shape", "obs_dim", "obs_space",
        "state", "states", "state_dim", "state_shape",
    ),
    "action": ("actions", "action_space", "action_spec", "action_shape", "action_dim", "act", "act_dim"),
    "reward": ("rewards", "rew", "reward_shape"),
    "terminated": ("terminal", "terminals", "termination", "terminations", "terminateds"),
    "truncated": ("timeout", "timeouts", "time_outs", "truncation", "truncations", "truncateds"),
    "next_obs": (
        "next_observation", "next_observations", "obs_next", "new_obs", "next_state", "next_states", "obs2",
    ),
    "value": ("values", "state_value", "vf_preds"),
    "log_prob": ("log_probs", "logprob", "logprobs", "logp", "old_log_prob", "actions_log_prob", "action_log_prob"),
    "drop_last": ("drop_tail", "drop_remainder"),
    "extra": ("extras", "extra_fields"),
    "device": ("storage_device",),
    "autoreset": ("autoreset_mode",),
    "seed": ("random_state", "rng", "generator"),
    "min_size": ("min_size_to_sample", "learning_starts"),
}  # fmt: skip
"""Our keywords, each with the names that other libraries use."""

_PRIORITIZED_REMEDY = "Pass sampler=rl.Prioritized(alpha=…, beta=…)."
_N_STEP_REMEDY = "Sample with a view: replay.sample(256, rl.NStep(n, gamma))."
_KEYWORD_REMEDIES: Mapping[str, Mapping[str, str]] = {
    "ReplayBuffer": {
        **dict.fromkeys(("alpha", "beta", "prioritized", "per"), _PRIORITIZED_REMEDY),
        **dict.fromkeys(("n_step", "n_steps", "nstep", "gamma"), _N_STEP_REMEDY),
        **dict.fromkeys(("batch_size", "minibatch_size"), "Leave it out: sample(batch_size) takes it."),
        "optimize_memory_usage": "Leave it out: every observation is always stored once.",
        "handle_timeout_termination": "Leave it out: terminated and truncated are always stored apart.",
        "prefetch": "Wrap the buffer: rl.prefetch(replay, batch_size).",
    },
    "RolloutBuffer": {
        **dict.fromkeys(("gae_lambda", "lam", "gamma"), "Leave it out: compute_advantage(gamma=…, lam=…) takes it."),
        **dict.fromkeys(("batch_size", "minibatch_size"), "Leave it out: minibatches(batch_size) takes it."),
        "hidden_state": "Declare it: extra={'hidden': rl.Carry(shape)}.",
    },
}
"""Remedies for keywords of other libraries that have no counterpart in relive, by class and keyword."""

_SB3_KEYWORDS: Mapping[str, set[str]] = {
    "ReplayBuffer": {"n_envs", "optimize_memory_usage"},
    "RolloutBuffer": {"n_envs", "gae_lambda"},
}
"""Keywords that identify a call by a Stable-Baselines3 algorithm, by class."""

_DONE_REMEDY = "terminated and truncated: a time limit is not a failure"
_DONE_NAMES = ("done", "dones", "episode_end", "is_done", "ended")
_ADD_NAMES = (
    "push", "store", "append", "put", "insert", "store_transition", "add_transition", "add_transitions", "remember",
)  # fmt: skip
_METHOD_NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "ReplayBuffer": {
        "add": (*_ADD_NAMES, "save_to_memory"),
        "extend": ("add_batch", "add_trajectory", "push_batch"),
        "sample": ("sample_batch", "get", "get_batch", "sample_from_indices", "sample_indices"),
        "update_priority": ("update_priorities", "update_weight", "set_priority", "set_priorities"),
        "clear": ("reset", "empty", "flush"),
        "len": ("size", "pos", "full", "is_full", "current_size", "get_stored_size", "counter"),
    },
    "RolloutBuffer": {
        "add": _ADD_NAMES,
        "compute_advantage": (
            "compute_returns", "compute_returns_and_advantage", "compute_returns_and_advantages", "compute_gae",
            "compute_advantages", "finish_path", "compute_return",
        ),
        "minibatches": (
            "get", "sample", "sample_batch", "mini_batch_generator", "feed_forward_generator", "get_minibatches",
            "get_minibatch", "get_generator", "batches", "generator", "iterate",
        ),
        "sequences": ("recurrent_generator", "recurrent_mini_batch_generator", "get_sequences"),
        "clear": ("reset", "empty", "after_update", "flush"),
        "is_full": ("full",),
        "num_stored": ("size", "pos", "step", "ptr", "current_size"),
    },
    "DistillationBuffer": {
        "add": (*_ADD_NAMES, "extend", "add_batch"),
        "sample": ("sample_batch", "get", "get_batch"),
        "epochs": ("minibatches", "mini_batch_generator", "batches"),
        "clear": ("reset", "empty", "flush"),
        "len": ("size", "pos", "full"),
    },
}  # fmt: skip
"""Our methods by class, each with the names that other libraries use."""


def suggests_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a constructor, so that the TypeError for an unknown keyword suggests our keyword."""
    parameters = inspect.signature(function).parameters
    where = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except TypeError:
            unknown = next((name for name in kwargs if name not in parameters), None)
            if unknown is None:
                raise
            ours = tuple(name for name in parameters if name not in ("self", "cls"))
            message = _make_keyword_message(where, unknown, kwargs[unknown], ours)
            if kwargs.keys() >= _SB3_KEYWORDS.get(where, {None}):
                argument = f"{where.removesuffix('Buffer').lower()}_buffer_class"
                remedy = f"Pass {argument}=relive.compat.stable_baselines3.{where}."
                message = explain(argument, "a buffer of Stable-Baselines3", f"relive's own {where}", remedy)
        raise TypeError(message)

    return call


def suggests_init_keywords(cls: C) -> C:
    """Apply `suggests_keywords` to the generated `__init__` of a dataclass."""
    cls.__init__ = suggests_keywords(cls.__init__)
    return cls


class RenamedAttribute:
    """Attribute with a name of another library; access raises an AttributeError with our name."""

    def __init__(self, owner: str, name: str, ours: str) -> None:
        expression = "len(buffer)" if ours == "len" else f"{owner}.{ours}"
        self._name, self._message = name, explain(owner, expression, name, f"Use {expression} instead.")
        self.__doc__ = f"Not a part of relive: use {expression}."  # `help` shows it

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(self._message, name=self._name, obj=None)  # without `obj` Python guesses no other name


def suggests_methods(cls: C) -> C:
    """Decorate a class, so that access to a method name of another library raises an error with our name.

    A `__getattr__` would slow down the access to every attribute.
    """
    our_names = {name: ours for ours, names in _METHOD_NAMES[cls.__name__].items() for name in names}
    attributes = {name: RenamedAttribute(cls.__name__, name, ours) for name, ours in our_names.items()}
    hiding_dir = {"__dir__": lambda self: [name for name in object.__dir__(self) if name not in our_names]}
    for name, attribute in (attributes | hiding_dir).items():
        setattr(cls, name, attribute)
    return cls


def suggest_field_remedy(name: str, declared_names: Iterable[str]) -> str:
    """Return the remedy for an undeclared field: use the name that relive gives it, or declare it in `extra`."""
    if name in _DONE_NAMES:
        return f"Pass {_DONE_REMEDY}."
    our_name = _find_our_name(name, tuple(declared_names))
    return f"Pass it as {our_name}." if our_name else f"Declare it: extra={{{name!r}: shape}}."


def _make_keyword_message(where: str, name: str, value: object, ours: Collection[str]) -> str:
    remedy = _KEYWORD_REMEDIES.get(where, {}).get(name)
    got = f"{name}={_format_argument(value)}"
    if remedy is not None:
        return explain(where, f"keywords among {', '.join(ours)}", got, remedy)
    our_name = _find_our_name(name, tuple(ours))
    if our_name is None:
        return explain(where, f"keywords among {', '.join(ours)}", got, "Leave it out.")
    return explain(where, f"the keyword {our_name}", got, f"Write {our_name}={_format_argument(value)}.")


def _find_our_name(name: str, ours: Collection[str]) -> str | None:
    for our_name, other_names in _KEYWORD_NAMES.items():
        if name in other_names and our_name in ours:
            return our_name
    return next(iter(difflib.get_close_matches(name, ours, n=1, cutoff=0.75)), None)


def _format_argument(value: object) -> str:
    """Return the source text of a number or short string; an ellipsis for any other value."""
    return repr(value) if isinstance(value, bool | int | float | str) and len(repr(value)) <= 20 else "…"
