"""Pages of the site that are built, not committed: a hook of mkdocs.

The conformance table and all measurements come from kept results. The reference is committed as a list of names; the
site shows the full text of every name.
"""

from __future__ import annotations

import json
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
_MEMBERS = re.compile(r"^- `([\w.]+)`:(.*?)\.$", re.MULTILINE | re.DOTALL)
_SPECIAL = {"len": "__len__", "[name]": "__getitem__", "[ids]": "__getitem__"}
_SAME_AS_MODULE = {"relive.prefetch": "relive.concurrent.prefetch.prefetch"}
"""Functions with the same name as their module."""


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
    """Replace each table of the reference by the full text of its names, with the members that the page lists."""
    if page.file.src_uri != "reference.md":
        return markdown
    members = {f"relive.{name}": re.findall(r"`([^`]+)`", listed) for name, listed in _MEMBERS.findall(markdown)}
    return _TABLE.sub(lambda table: "\n".join(_full_text(name, members) for name in _NAME.findall(table[1])), markdown)


def _full_text(name: str, members: dict[str, list[str]]) -> str:
    shown = [_SPECIAL.get(member, member) for member in members.get(name, [])]
    options = {"members": shown or False, "inherited_members": bool(shown), "show_bases": "Error" in name}
    lines = (f"      {option}: {json.dumps(value)}" for option, value in options.items())
    return "\n".join([f"::: {_SAME_AS_MODULE.get(name, name)}", "    options:", *lines, ""])
