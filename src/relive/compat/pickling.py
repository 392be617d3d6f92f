"""Pickles of the adapters' buffers that another version of relive has written."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from relive.errors import IncompatibleCheckpoint, explain


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
            raise IncompatibleCheckpoint(explain(function.__module__, expected, got, remedy)) from error

    return restore
