"""The HTML of a report in a notebook is small and self-contained, and shows names only as text."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
import torch

import relive as rl
from relive.inspector import report as reports
from relive.inspector.report import Report

HOSTILE = "</td><script>hacked=1</script><img src=x onerror=hacked=1>&\"'"


class Texts(HTMLParser):
    """The texts of cells, and the names of tags and attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        self.tags.remove(tag)

    def handle_data(self, data: str) -> None:
        self.cells.append(data)

    def cell_after(self, name: str) -> str:
        """Return the cell to the right of the cell `name`."""
        return self.cells[self.cells.index(name) + 1]


@pytest.fixture(scope="module")
def report() -> Report:
    frames = rl.Stacked(rl.Field((8, 8), torch.uint8), 4)
    replay = rl.ReplayBuffer(
        1200,
        obs={"camera": 3, "frames": frames},
        action=(),
        num_envs=2,
        autoreset="NEXT_STEP",
        sampler=rl.Prioritized(),
    )
    obs = {"camera": torch.zeros(2, 3), "frames": torch.zeros(2, 8, 8, 4, dtype=torch.uint8)}
    flags = torch.zeros(2, dtype=torch.bool)
    next_obs = {"camera": obs["camera"] + 1, "frames": obs["frames"].clone()}
    replay.add(obs, torch.zeros(2), torch.zeros(2), flags, flags, next_obs)
    return rl.inspect(replay)


def test_the_card_is_small_self_contained_and_fits_light_and_dark(report: Report) -> None:
    html = report._repr_html_()
    actual = Texts(html)
    assert actual.tags == [], "every tag is closed"
    assert actual.attributes == {"style"}
    assert len(html) < 12_000
    assert not re.search(r"https?:|url\(|<(?!/?(div|strong|table|tbody|tr|td)\b)", html)
    assert not re.search(r"#[0-9a-f]{3}|rgb|white|black", html), "colours are the notebook's own"


def test_every_part_of_a_card_is_only_text() -> None:
    actual = Texts(reports.format_html_card(reports.ReportCard([(HOSTILE, HOSTILE)], [[HOSTILE] * 6], [HOSTILE])))
    assert sum(HOSTILE in cell for cell in actual.cells) == 9
    assert actual.attributes == {"style"}


def test_the_card_shows_warnings_facts_episodes_and_fields(report: Report) -> None:
    shown = Texts(report._repr_html_())
    assert any("never change" in cell for cell in shown.cells)
    assert shown.cell_after("capacity") == "1,200"
    assert shown.cell_after("environments") == "2"
    assert shown.cell_after("autoreset") == "NEXT_STEP"
    assert "Prioritized(alpha=0.6" in shown.cell_after("sampler")
    assert shown.cell_after("episodes: ends") == "running 2"
    assert shown.cell_after("reward") == "float32"
    assert shown.cell_after("obs.frames") == "uint8[8, 8, 4]"


def test_a_long_table_is_cut_and_says_so() -> None:
    wide = rl.ReplayBuffer(9, obs={f"part{i}": 1 for i in range(60)}, action=())
    shown = Texts(rl.inspect(wide)._repr_html_()).cells
    assert "and 24 more" in shown
    assert "obs.part39" in shown
    assert "obs.part40" not in shown
