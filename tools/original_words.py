"""Find lines of code, and sentences in strings and comments, that our adapters have in common with an original.

Run it as `python -m tools.original_words agilerl CHECKOUT`. Signatures, names and defaults are interface, and so
stay in the list; sentences and bodies of functions are to be our own. The exit code is 1 if a sentence is shared.
"""

from __future__ import annotations

import argparse
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

import relive
from benchmarks.adapters import ORIGINALS

SHORTEST = 30
"""Minimum length of a compared line; shorter lines are common by chance."""
RUN = 6
"""Number of words in the same order that make a shared sentence."""
WORD = re.compile(r"[A-Za-z_][\w.]*|\d+")
PREFIX = re.compile(r"^[A-Za-z]+(?=['\"])")
"""The prefix letter of a string literal, which is not a word."""
_WORDED = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def lines(code: str) -> Iterator[str]:
    """The long lines without indentation, except imports."""
    for line in map(str.strip, code.splitlines()):
        if len(line) >= SHORTEST and not line.startswith(("import ", "from ")):
            yield line


def sentences(code: str) -> Iterator[str]:
    """Strings and comments; adjacent ones are joined to one text."""
    text: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type in _WORDED:
            text.append(PREFIX.sub("", token.string))
        elif token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT) and text:
            yield " ".join(text)
            text = []
    if text:
        yield " ".join(text)


def runs(text: str) -> Iterator[str]:
    """Every sequence of that number of words."""
    words = [word.lower() for word in WORD.findall(text)]
    for start in range(len(words) - RUN + 1):
        yield " ".join(words[start : start + RUN])


def shared(ours: Sequence[Path], theirs: Sequence[Path]) -> tuple[list[str], list[str]]:
    """Lines and word sequences that files of both sides have, each with our file."""
    codes = [path.read_text(encoding="utf-8") for path in theirs]
    their_lines = {line for code in codes for line in lines(code)}
    their_runs = {run for code in codes for text in sentences(code) for run in runs(text)}
    found_lines, found_runs = [], []
    for path in ours:
        code = path.read_text(encoding="utf-8")
        found_lines += [f"{path.name}: {line}" for line in lines(code) if line in their_lines]
        texts = [run for text in sentences(code) for run in runs(text)]
        found_runs += [f"{path.name}: {run}" for run in texts if run in their_runs]
    return found_lines, found_runs


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the shared lines and sentences."""
    parser = argparse.ArgumentParser(prog="python -m tools.original_words", description=__doc__)
    parser.add_argument("original", choices=[*ORIGINALS, "sb3_contrib"], help="whose words")
    parser.add_argument("checkout", type=Path, help="a clone of the original, or the folder of its package")
    options = parser.parse_args(arguments)
    ours = sorted((Path(relive.__file__).parent / "compat" / options.original).rglob("*.py"))
    found_lines, found_runs = shared(ours, sorted(options.checkout.rglob("*.py")))
    for line in found_lines:
        print(f"line      {line}")
    for run in found_runs:
        print(f"sentence  {run}")
    return int(bool(found_runs))


if __name__ == "__main__":
    raise SystemExit(main())
