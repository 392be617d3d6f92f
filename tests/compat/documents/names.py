"""The public names that the adapters must have, read from the files of this folder; names.txt explains the notation."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREFIX = "relive.compat."


@dataclass(frozen=True)
class Name:
    """One name of an original."""

    module: str
    path: str
    """The name in the module; a class and its member are joined by a dot."""
    arguments: ast.arguments | None
    """None where it is not called."""

    def __str__(self) -> str:
        return f"{self.module}:{self.path}"

    @property
    def system(self) -> str:
        """The original's package."""
        return self.module.partition(".")[0]


def names(file: str) -> Iterator[Name]:
    """Yield the names of a file of this folder in their order."""
    module = owner = ""
    for line in (Path(__file__).parent / file).read_text(encoding="utf-8").splitlines():
        if not line.startswith(" "):
            module = "" if line.startswith("#") else line.strip()
            continue
        found = re.fullmatch(r"\s+(\.?)(\w+)(?:\((.*)\))?", line)
        if found is None or not module:
            raise ValueError(f"{file}: expected a name below a module, got {line!r}")
        dot, name, arguments = found.groups()
        path = f"{owner}.{name}" if dot else name
        owner = owner if dot else name
        yield Name(module, path, None if arguments is None else parsed(arguments))


def parsed(text: str) -> ast.arguments:
    """The arguments between a pair of parentheses."""
    (function,) = ast.parse(f"def f({text}): ...").body
    assert isinstance(function, ast.FunctionDef)
    return function.args


def difference(name: Name, ours: Any) -> str | None:
    """How our callable differs from what is printed, or None."""
    assert name.arguments is not None
    parameters = [p for p in inspect.signature(ours).parameters.values() if p.name != "self"]
    printed = [argument.arg for argument in name.arguments.args]
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    mine = [p.name for p in by_position[: len(printed)]]
    named = [(theirs, own) for theirs, own in zip(printed, mine, strict=False) if not theirs.startswith("_")]
    if any(theirs != own for theirs, own in named) or (len(mine) < len(printed) and not takes_any):
        return f"expected the arguments {printed}, got {mine}"
    return _other_defaults(name.arguments, {p.name: p for p in parameters}) or _refused(name.arguments, ours)


def _other_defaults(arguments: ast.arguments, mine: dict[str, inspect.Parameter]) -> str | None:
    """The first default that is not the printed one."""
    last = arguments.args[len(arguments.args) - len(arguments.defaults) :]
    printed = [
        *zip(last, arguments.defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    for argument, default in printed:
        if default is not None and argument.arg in mine and not _is(mine[argument.arg].default, default):
            return f"expected {argument.arg}={ast.unparse(default)}, got {mine[argument.arg].default!r}"
    return None


def _is(value: Any, printed: ast.expr) -> bool:
    """Whether a default is what is printed: a literal, an expression, or the member of an enumeration."""
    try:
        expected = ast.literal_eval(printed)
    except ValueError:
        return ast.unparse(printed) in (repr(value), f"{type(value).__name__}.{getattr(value, 'name', None)}")
    return type(value) in (type(expected), int, float) and value == expected


def _refused(arguments: ast.arguments, ours: Any) -> str | None:
    """Why the printed call is no call of ours."""
    required = len(arguments.args) - len(arguments.defaults)
    signature = inspect.signature(ours)
    given = [None] * (required + ("self" in signature.parameters))
    try:
        signature.bind(*given, **{argument.arg: None for argument in arguments.kwonlyargs})
    except TypeError as error:
        return f"expected {ast.unparse(arguments)} to be enough: {error}"
    return None
