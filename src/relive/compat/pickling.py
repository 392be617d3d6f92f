"""Pickles of the adapters' buffers: their attributes and cores, and the refusal of pickles of other versions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from relive.checkpoint.state_dict import load_packed_state, pack_state
from relive.errors import IncompatibleCheckpoint, explain
from relive.replay.buffer import ReplayBuffer


def restores(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that restores a pickled buffer, such as `__setstate__`.

    A state that lacks what this version needs is an IncompatibleCheckpoint: between two versions a private attribute
    may have been renamed.
    """

    @wraps(function)
    def restore(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (AttributeError, KeyError) as error:
            expected, got = "a pickle that this version of relive wrote", f"one that lacks {error}"
            remedy = "Load it with the version that wrote it."
            raise IncompatibleCheckpoint(explain(type(arguments[0]).__module__, expected, got, remedy)) from error

    return restore


class PicklableBuffer:
    """Base class of buffers whose pickles and copies lack some attributes, which are derived from the others."""

    _derived_attributes: tuple[str, ...] = ()
    """Names of the attributes that `_derive` sets."""

    def _derive(self) -> None:
        """Set the derived attributes after the others were restored."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in self._derived_attributes}

    @restores
    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._derive()


def pack_core(core: ReplayBuffer | None) -> dict[str, Any] | None:
    """Return the state of a core for a pickle; None without a core."""
    return None if core is None else pack_state(core)


def unpack_core(state: Mapping[str, Any] | None, make: Callable[[], ReplayBuffer]) -> ReplayBuffer | None:
    """Make a core and restore the result of `pack_core`; None without a core."""
    if state is None:
        return None
    core = make()
    load_packed_state(core, state)
    return core
