"""Find lines of code, and sentences in strings and comments, that our adapters have in common with an original.

Run it as `python -m tools.original_words agilerl CHECKOUT`. Shared signatures, names and defaults are expected:
they are the interface. Sentences and function bodies must be our own. The exit code is 1 if a sentence is shared.
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

MIN_LINE_LENGTH = 30
"""Minimum length of a compared line; shorter lines are common by chance."""
SEQUENCE_LENGTH = 6
"""Number of consecutive words that count as a shared sentence."""
WORD = re.compile(r"[A-Za-z_][\w.]*|\d+")
PREFIX = re.compile(r"^[A-Za-z]+(?=['\"])")
"""Prefix letters of a string literal, such as f."""
_TEXT_TOKENS = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def long_lines(code: str) -> Iterator[str]:
    """Yield the long lines of code except imports, without their indentation."""
    for line in map(str.strip, code.splitlines()):
        if len(line) >= MIN_LINE_LENGTH and not line.startswith(("import ", "from ")):
            yield line


def sentences(code: str) -> Iterator[str]:
    """Yield the strings and comments of code; adjacent texts are joined."""
    text: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type in _TEXT_TOKENS:
            text.append(PREFIX.sub("", token.string))
        elif token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT) and text:
            yield " ".join(text)
            text = []
    if text:
        yield " ".join(text)


def word_sequences(text: str) -> Iterator[str]:
    """Yield every sequence of `SEQUENCE_LENGTH` words."""
    words = [word.lower() for word in WORD.findall(text)]
    for start in range(len(words) - SEQUENCE_LENGTH + 1):
        yield " ".join(words[start : start + SEQUENCE_LENGTH])


def find_shared(ours: Sequence[Path], theirs: Sequence[Path]) -> tuple[list[str], list[str]]:
    """Return the lines and word sequences that occur on both sides, each with the name of our file."""
    codes = [path.read_text(encoding="utf-8") for path in theirs]
    their_lines = {line for code in codes for line in long_lines(code)}
    their_sequences = {run for code in codes for text in sentences(code) for run in word_sequences(text)}
    shared_lines, shared_sequences = [], []
    for path in ours:
        code = path.read_text(encoding="utf-8")
        shared_lines += [f"{path.name}: {line}" for line in long_lines(code) if line in their_lines]
        texts = [run for text in sentences(code) for run in word_sequences(text)]
        shared_sequences += [f"{path.name}: {run}" for run in texts if run in their_sequences]
    return shared_lines, shared_sequences


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the shared lines and sentences."""
    parser = argparse.ArgumentParser(prog="python -m tools.original_words", description=__doc__)
    parser.add_argument("original", choices=[*ORIGINALS, "sb3_contrib"], help="the library to compare with")
    parser.add_argument("checkout", type=Path, help="a clone of the original, or the folder of its package")
    options = parser.parse_args(arguments)
    ours = sorted((Path(relive.__file__).parent / "compat" / options.original).rglob("*.py"))
    shared_lines, shared_sequences = find_shared(ours, sorted(options.checkout.rglob("*.py")))
    for line in shared_lines:
        print(f"line      {line}")
    for run in shared_sequences:
        print(f"sentence  {run}")
    return int(bool(shared_sequences))


if __name__ == "__main__":
    raise SystemExit(main())
