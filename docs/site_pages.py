"""Pages of the site that are built, not committed: a hook of mkdocs.

The conformance table and all measurements come from kept results. The reference, which is committed as a list of names,
gets the full text of every name.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

from relive_conformance.report import Report, markdown

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.page import page as measurements  # noqa: E402 (the benchmarks are not installed)

_TABLE = re.compile(r"<!-- reference .*? -->\n(.*?)\n\n", re.DOTALL)
_NAME = re.compile(r"^\| `(relive[\w.]*)", re.MULTILINE)


def pages() -> dict[str, str]:
    """Every built page by its path in the site."""
    kept = (ROOT / "docs" / "conformance.json").read_text(encoding="utf-8")
    return {"conformance_table.md": markdown(Report.from_json(kept)), "performance_tables.md": measurements()}


def on_files(files: Any, config: Any) -> Any:
    """Add the built pages."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the full text of every name below its table in the reference."""
    if page.file.src_uri != "reference.md":
        return markdown
    return _TABLE.sub(lambda found: "\n".join(f"::: {name}\n" for name in _NAME.findall(found[1])) + "\n", markdown)
