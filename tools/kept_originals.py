"""The results file of the originals' tests and trainers, the source of the tables of docs/migrating."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["KEPT", "change"]

KEPT = Path(__file__).parent.parent / "docs" / "migrating" / "originals.json"


@contextmanager
def change(original: str, path: Path = KEPT) -> Iterator[dict[str, Any]]:
    """Yield the existing entry of an original; write it back when the block ends."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    if original not in kept:
        raise SystemExit(f"{path.name}: expected an entry for {original}. Add one with title and version.")
    yield kept[original]
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
