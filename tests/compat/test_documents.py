"""The adapters have the public names of the originals, and the examples of the pages on migrating run."""

from __future__ import annotations

import json
import runpy
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.compat.documents import guide
from tests.compat.documents.names import PREFIX, Name, difference, names

ROOT = Path(__file__).parents[2]
NAMES = list(names("names.txt"))
SIGNATURES = list(names("signatures.txt"))
# The dependencies of the originals warn.
pytestmark = pytest.mark.filterwarnings("default")


def ours(name: Name) -> Any:
    """Return our adapter's object of a name."""
    try:
        found: Any = import_module(PREFIX + name.module)
    except ModuleNotFoundError as error:
        if error.name == name.system:
            pytest.skip(f"{name.system} is not installed")
        raise
    for part in name.path.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", [*NAMES, *SIGNATURES], ids=str)
def test_a_name_is_below_our_prefix_with_its_arguments_and_defaults(name: Name) -> None:
    found = ours(name)
    if name.arguments is not None:
        assert callable(found)
        assert difference(name, found) is None


def test_no_name_is_listed_twice_and_every_system_has_some() -> None:
    assert max(Counter(map(str, NAMES)).values()) == 1
    assert {name.system for name in NAMES} == {
        "agilerl", "apexrl", "embodichain", "rl_buffer", "rsl_rl", "stable_baselines3",
    }  # fmt: skip


GUIDES = {
    "agilerl": "buffer.full and memory.is_full",
    "apexrl": "len(rollout) == 24 * 8 and len(buffer) == 8 and replay.action_dtype == torch.float32",
    "embodichain": "rollout['return'].shape == (8, 17) and len(batch['returns']) == 32",
    "rl_buffer": "len(batch.returns) == 32",
    "rsl_rl": "len(rollout) == 24 * 8 and storage.step == 0",
    "stable_baselines3": "type(model.replay_buffer).__name__ == 'PrioritizedReplayBuffer'",
}
"""What is true after the examples of each page."""


@pytest.mark.parametrize("system", GUIDES)
def test_the_examples_of_a_page_run_as_printed(system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if system in ("rsl_rl", "stable_baselines3"):
        pytest.importorskip(system, reason=f"{system} is not installed")
    monkeypatch.chdir(tmp_path)
    variables: dict[str, Any] = {}
    for block in guide(system):
        # Blocks with imports of AgileRL show the code before the migration.
        if "from agilerl" not in block:
            exec(compile(block, f"{system}.md", "exec", dont_inherit=True), variables)
    assert eval(GUIDES[system], variables)


FRONT_PAGE = runpy.run_path(str(ROOT / "docs" / "front_page.py"))
ORIGINALS = json.loads((ROOT / "docs" / "migrating" / "originals.json").read_text(encoding="utf-8"))


def test_the_tables_of_the_pages_are_those_of_the_kept_results() -> None:
    pages = list(FRONT_PAGE["pages"]())
    assert len(pages) > len(ORIGINALS)
    for path, tables in pages:
        page = path.read_text(encoding="utf-8")
        assert FRONT_PAGE["written"](page, tables) == page, f"{path.name}: run python docs/front_page.py"


@pytest.mark.parametrize("system", ORIGINALS)
def test_the_kept_number_of_names_is_that_of_the_list(system: str) -> None:
    assert ORIGINALS[system]["names"] == sum(name.system == system for name in NAMES)
