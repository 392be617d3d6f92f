"""The algorithms, trainers and functions of AgileRL that make buffers: here they make ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from relive.compat.agilerl.components import replay_buffer
from relive.compat.agilerl.components.rollout_buffer import RolloutBuffer

_SETTINGS = {
    "ReplayBuffer": ("max_size", "device", "dtype"),
    "MultiStepReplayBuffer": ("max_size", "n_step", "gamma", "device", "dtype"),
    "PrioritizedReplayBuffer": ("max_size", "alpha", "device", "dtype"),
}


def on_our_buffers(made: Any) -> Any:
    """What AgileRL has just made, with our buffers: a replay buffer, an agent, or a list of them.

    Anything else comes back as it is.
    """
    if isinstance(made, list):
        made[:] = map(on_our_buffers, made)
        return made
    kind = type(made)
    if not kind.__module__.startswith("agilerl."):
        return made
    if kind.__name__ in _SETTINGS and not len(made):
        settings = {name: getattr(made, name) for name in _SETTINGS[kind.__name__]}
        return getattr(replay_buffer, kind.__name__)(**settings)
    if hasattr(kind, "create_rollout_buffer"):
        made.__class__ = algorithm(kind)
        made.rollout_buffer = RolloutBuffer.like(made.rollout_buffer)
    return made


@cache
def function(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """AgileRL's function, whose results are on our buffers."""

    @wraps(theirs)
    def ours(*arguments: Any, **named: Any) -> Any:
        return on_our_buffers(theirs(*arguments, **named))

    ours.__module__ = f"relive.compat.{theirs.__module__}"  # where pickle finds it
    return ours


@cache
def algorithm(theirs: Any) -> type:
    """AgileRL's algorithm, which makes our rollout buffer, now and after mutations."""

    def create_rollout_buffer(self: Any) -> None:
        """Replace the buffer by an empty one for the current settings."""
        theirs.create_rollout_buffer(self)
        self.rollout_buffer = RolloutBuffer.like(self.rollout_buffer)

    return _subclass(theirs, create_rollout_buffer=create_rollout_buffer)


@cache
def trainer(theirs: Any) -> type:
    """AgileRL's trainer, whose agents and memories are on our buffers."""
    return _subclass(theirs, population=_OnOurBuffers(), memory=_OnOurBuffers(), n_step_memory=_OnOurBuffers())


class _OnOurBuffers:
    """An attribute of a trainer: what is assigned to it gets our buffers."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, owner: Any, kind: type) -> Any:
        try:
            return self if owner is None else vars(owner)[self.name]
        except KeyError:
            raise AttributeError(f"{kind.__name__}: expected {self.name} to be set, got nothing.") from None

    def __set__(self, owner: Any, made: Any) -> None:
        vars(owner)[self.name] = on_our_buffers(made)


@cache
def specification(theirs: Any) -> type:
    """AgileRL's specification of a replay buffer; before 2.58 it makes the buffer itself."""
    methods = [name for name in ("init_buffer", "init_n_step_buffer") if hasattr(theirs, name)]
    return _subclass(theirs, **{name: function(getattr(theirs, name)) for name in methods}) if methods else theirs


def _subclass(theirs: type, **methods: Any) -> type:
    """A subclass under the same name, which pickle finds in our module of that name."""
    module = f"relive.compat.{theirs.__module__}"
    names = {"__module__": module, "__qualname__": theirs.__qualname__, "__doc__": theirs.__doc__}
    return type(theirs)(theirs.__name__, (theirs,), {**names, **methods})


MAKERS = {
    "PPO": algorithm,
    "RecurrentPPO": algorithm,
    "LocalTrainer": trainer,
    "ReplayBufferSpec": specification,
    **dict.fromkeys(
        (
            "create_population", "create_population_from_spec", "build_replay_buffer_from_spec", "init_buffer",
            "init_n_step_buffer",
        ),
        function,
    ),
}  # fmt: skip
"""By AgileRL's name of it, what makes ours of it."""
