"""Error messages name the thing that is meant: no message ends with a word that only points at it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "relive"

PARTS = ("where", "expected", "got", "remedy")
"""The arguments of `explain`."""

POINTING_END = re.compile(r"\b(another|other|others|none|neither|some|those|these|one|such|so|two)$")
"""Words that say nothing at the end of `expected` or `got`."""

POINTING = re.compile(
    r"^(one|ones|those|that|some|others) (with|over|that|to|in|of which|which)\b"
    r"|\b(of which some|that (is|are) (none|some|one)|cannot be (one|some)|other (frames|rows|settings|ones))\b"
    r"|\b(somebody|nobody|anybody|everybody|whoever|of it)\b"
    r"|\bMake one\b|\bno whole number\b|^it \w+ by\b"
)
"""Phrases that point at a noun instead of naming it, anywhere in `expected`, `got` or `remedy`."""

ALLOWED = {
    ("compat.stable_baselines3.her.her_replay_buffer", "one with {}"),
    ("storage.allocator", "a machine without one"),
    ("storage.files", "it held by {} all the time"),
    ("storage.shared", "others"),
    ("replay.row_storage", "a stack of other frames"),
    ("rollout.advantages", "none"),
    ("rollout.batching", "a cleared one"),
    ("rollout.storage", "none"),
    ("statistics.observers", "two"),
}
"""(module, text) that still point. This list only shrinks."""


def texts(node: ast.AST, function: ast.AST) -> Iterator[str]:
    """The texts that an argument may have; `{}` stands for a value that is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)  # type: ignore[misc]
    elif isinstance(node, ast.IfExp):
        yield from texts(node.body, function)
        yield from texts(node.orelse, function)
    elif isinstance(node, ast.Name):
        for name, value in assigned(function):
            if name == node.id and not isinstance(value, ast.Name):
                yield from texts(value, function)


def assigned(function: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The names that a function assigns, each with its value."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.value
                elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    for part, value in zip(target.elts, node.value.elts, strict=True):
                        if isinstance(part, ast.Name):
                            yield part.id, value


def points(part: str, text: str) -> bool:
    """Whether a part of a message points at a thing that it does not name."""
    return bool(POINTING.search(text) or (part in ("expected", "got") and POINTING_END.search(text)))


def messages(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(part, text) of every message that `explain` makes in a module."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "explain":
                for part, argument in zip(PARTS, node.args, strict=False):
                    yield from ((part, text) for text in texts(argument, function))


def test_messages_name_the_thing_that_is_meant() -> None:
    found, pointing = 0, set()
    for file in sorted(SOURCE.rglob("*.py")):
        name = ".".join(file.relative_to(SOURCE).with_suffix("").parts)
        for part, text in messages(ast.parse(file.read_text(encoding="utf-8"))):
            found += 1
            if points(part, text):
                pointing.add((name, text))
    assert found > 800
    assert pointing == ALLOWED


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("got", "others"),
        ("got", "another"),
        ("expected", "slots of which some are drawn"),
        ("expected", "rows that are some"),
        ("got", "one over the buffer"),
        ("got", "a dead one"),
        ("got", "a stack of other frames"),
        ("remedy", "Make one of it."),
        ("remedy", "Use what somebody else made."),
    ],
)
def test_pointing_is_noticed(part: str, text: str) -> None:
    assert points(part, text)


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("expected", "one of {}"),
        ("expected", "one value per step"),
        ("got", "shape {}"),
        ("remedy", "Start fewer shards: each environment belongs to one shard."),
        ("remedy", "Squeeze it."),
    ],
)
def test_plain_sentences_pass(part: str, text: str) -> None:
    assert not points(part, text)
