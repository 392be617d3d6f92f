"""The documentation as it is built: every constructor with its arguments, and no line of code cut off."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import relive as rl
from tests.inspector import chromium

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
CLASSES = [
    name
    for name in rl.__all__
    if inspect.isclass(made := getattr(rl, name))
    and not issubclass(made, Exception)
    and not getattr(made, "_is_protocol", False)
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("the documentation cannot be built here: relive[docs] is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def reference(site: Path) -> dict[str, str]:
    """The HTML of every heading's section, by the heading's name."""
    page = (site / "reference" / "index.html").read_text("utf-8")
    _, *parts = re.split(r'<h[2-6] id="([^"]+)"', page)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_constructor_is_shown_with_its_arguments(reference: dict[str, str]) -> None:
    for name in CLASSES:  # in one test: each process that has one of several would build the site
        arguments = list(inspect.signature(getattr(rl, name)).parameters)
        section = reference[f"relive.{name}"]
        signature = re.search(r'<div class="doc-signature highlight">(.*?)</div>', section, re.DOTALL)
        # A class without a constructor of its own, such as Sampler, has no signature.
        shown = re.findall(r'<span class="n">(\w+)</span><span class="p">:</span>', signature[1]) if signature else []
        explained = re.findall(r'<li class="doc-section-item field-body">\s*<b><code>(\w+)</code>', section)
        assert shown == arguments, name
        assert sorted(explained) == sorted(arguments), name


def test_no_line_of_code_is_cut_off_in_a_window_of_1280_pixels(request: pytest.FixtureRequest) -> None:
    program = chromium.find()
    if program is None:
        pytest.skip(f"no Chromium here: none of {', '.join(chromium.NAMES)} is on the path, and CHROMIUM is not set")
    site: Path = request.getfixturevalue("site")
    pages = sorted(site.rglob("index.html"))
    cut = """[...document.querySelectorAll('pre, pre code')].filter(x => x.scrollWidth > x.clientWidth)
        .map(x => x.textContent.split('\\n').reduce((a, b) => a.length > b.length ? a : b))"""
    with chromium.Chromium(program, 1280, 900) as browser:
        browser.resize(1280, 900)
        cut_lines = {}
        for page in pages:
            browser.open(page)
            cut_lines[str(page.relative_to(site))] = browser.run(cut)
    assert sum(page.read_text("utf-8").count("<pre") for page in pages) > 200, "there is code to look at"
    assert {page: lines for page, lines in cut_lines.items() if lines} == {}
