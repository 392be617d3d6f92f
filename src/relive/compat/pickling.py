"""Pickles of the adapters' buffers: their attributes and cores, and the refusal of pickles of other versions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from relive.checkpoint.state_dict import load_packed_state, pack_state
from relive.errors import IncompatibleCheckpoint, explain
from relive.replay.buffer import ReplayBuffer


def refuse_other_versions(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that restores a pickled buffer, such as `__setstate__`.

    If the pickle has other contents, because another version of relive wrote it, an IncompatibleCheckpoint is raised.
    """

    @wraps(function)
    def restore(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            expected, got = "a pickle that this version of relive wrote", f"other contents ({error})"
            remedy = "Load it with the version that wrote it."
            raise IncompatibleCheckpoint(explain("unpickling", expected, got, remedy)) from error

    return restore


class PicklableBuffer:
    """Base class of buffers whose pickles and copies contain the state of a replay core instead of the core.

    Attributes that `_set_derived_attributes` sets are left out.
    """

    _derived_attributes: tuple[str, ...] = ()
    """Names of the attributes that `_set_derived_attributes` sets."""

    def _set_derived_attributes(self) -> None:
        """Set the derived attributes from the restored ones; a core is still its saved state, for `restore_core`."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        attributes = {name: value for name, value in vars(self).items() if name not in self._derived_attributes}
        return {
            name: pack_state(value) if isinstance(value, ReplayBuffer) else value for name, value in attributes.items()
        }

    @refuse_other_versions
    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._set_derived_attributes()


def restore_core(core: ReplayBuffer, state: Any) -> ReplayBuffer:
    """Load the pickled state of a core into a new one with equal settings, and return it."""
    load_packed_state(core, state)
    return core
