"""The page in a headless Chromium: it is drawn without errors, and usable with mouse and keyboard."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from relive.schema import fields
from relive.statistics import observers
from tests.inspector import chromium
from tests.inspector.test_page import HOSTILE, walk

KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Home": 36, "End": 35}


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Chromium]:
    program = chromium.find()
    if program is None:
        pytest.skip(f"no Chromium here: none of {', '.join(chromium.NAMES)} is on the path, and CHROMIUM is not set")
    with chromium.Chromium(program) as one:
        yield one


def opened(browser: chromium.Chromium, buffer: Any, folder: Path) -> None:
    rl.inspect(buffer, html=folder / "page.html")
    browser.open(folder / "page.html")
    browser.run("document.querySelector('main').focus()")


def every(browser: chromium.Chromium, selector: str, what: str) -> Any:
    """Evaluate an expression in `x` for each element of a selector."""
    return browser.run(f"[...document.querySelectorAll({selector!r})].map(x => {what})")


def text(browser: chromium.Chromium, selector: str) -> str:
    return browser.run(f"document.querySelector({selector!r}).textContent")


def press(browser: chromium.Chromium, key: str, times: int = 1) -> None:
    for _ in range(times):
        browser.press(key, KEYS[key])


def click(browser: chromium.Chromium, selector: str, along: float = 0.5) -> None:
    browser.run(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center', behavior: 'instant'}})")
    box = browser.run(f"JSON.parse(JSON.stringify(document.querySelector({selector!r}).getBoundingClientRect()))")
    browser.click(box["x"] + along * box["width"], box["y"] + box["height"] / 2)


def prioritized() -> rl.ReplayBuffer:
    replay = walk([4, 30, 9], sampler=rl.Counted(rl.Prioritized()), stats=rl.EpisodeStats(None, reasons=("fall",)))
    for _ in range(5):
        batch = replay.sample(8)
        replay.update_priority(batch["index"], batch["reward"])
    return replay


def rollout() -> rl.RolloutBuffer:
    made = rl.RolloutBuffer(20, 3, obs={"a": 2, "b": (rl.Field(1), rl.Field((2, 2)))}, action=2, autoreset="NEXT_STEP")
    rng = np.random.default_rng(0)
    for _ in range(20):
        obs = {"a": rng.normal(size=(3, 2)), "b": (rng.normal(size=(3, 1)), rng.normal(size=(3, 2, 2)))}
        flags = rng.random((2, 3)) < 0.1
        made.add(obs, rng.normal(size=(3, 2)), rng.normal(size=3), *flags, value=rng.normal(size=3))
    made.compute_advantage(np.zeros(3))
    return made


def distillation() -> rl.DistillationBuffer:
    made = rl.DistillationBuffer(500, obs=3, seed=0)
    made.add(torch.rand(300, 3), torch.rand(300, 2))
    return made


def pictures() -> rl.ReplayBuffer:
    """A frame of step t is as bright as t."""
    replay = rl.ReplayBuffer(400, obs={"camera": rl.Stacked(rl.Field((16, 12), torch.uint8), 3)}, action=2, seed=0)
    for length in (40, 60):
        stacks = [np.stack([np.full((16, 12), max(t - k, 0), np.uint8) for k in (2, 1, 0)], -1) for t in range(61)]
        for t in range(length):
            steps = ({"camera": stacks[t]}, {"camera": stacks[t + 1]})
            replay.add(steps[0], [0.1 * t, -1], float(t == 5), False, t == length - 1, steps[1])
    return replay


def unordered() -> rl.ReplayBuffer:
    replay = rl.ReplayBuffer(200, obs=1, action=(), next_obs="stored", seed=0)
    for t in range(150):
        replay.add([t], 0.0, 1.0, False, False, [t + 1])
    return replay


def odd_numbers() -> rl.ReplayBuffer:
    replay = rl.ReplayBuffer(20, obs=2, action=(), seed=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "reward: expected finite numbers", rl.DataWarning)
        for x in (float("nan"), float("inf"), -1e30, 1e-30, 3.0):
            replay.add([x, 0], 0.0, x, False, False, next_obs=[7, 7])
    return replay


def empty() -> rl.ReplayBuffer:
    return rl.ReplayBuffer(9, obs=1, action=(), sampler=rl.Prioritized())


ALL = [prioritized, rollout, distillation, pictures, unordered, odd_numbers, empty]


@pytest.mark.parametrize("make", ALL)
def test_pages_are_drawn_without_console_messages(make: Any, browser: chromium.Chromium, tmp_path: Path) -> None:
    opened(browser, make(), tmp_path)
    assert browser.console == []
    outside = [url for url in browser.requests if not url.startswith("data:")]
    assert outside == [(tmp_path / "page.html").as_uri()]
    assert browser.run("scrollY") == 0, "a reader begins at the top"
    assert text(browser, "h1") in ("ReplayBuffer", "RolloutBuffer", "DistillationBuffer")
    said = browser.run("document.body.textContent.replace(document.getElementById('data').textContent, '')")
    assert "[object" not in said.replace(browser.run("document.scripts[1].textContent"), "")
    broken = (
        "[...document.querySelectorAll('path, rect, line')].filter(x => /NaN|Infinity|undefined/.test(x.outerHTML))"
    )
    assert browser.run(f"{broken}.length") == 0
    flat = "[...document.querySelectorAll('main svg')].filter(x => x.closest('[hidden]') === null)"
    assert browser.run(f"{flat}.filter(x => x.getBoundingClientRect().width < 10).length") == 0


def test_a_plot_is_read_with_the_arrow_keys(browser: chromium.Chromium, tmp_path: Path) -> None:
    opened(browser, walk([2, 2, 2, 2, 3, 4, 4]), tmp_path)
    readout = "#episodes figure:nth-child(2) .readout"
    assert text(browser, readout) == "mean 2.714, median 2"
    browser.run("document.querySelector('#episodes figure:nth-child(2) svg').focus()")
    press(browser, "ArrowRight")
    assert text(browser, readout) == "2: 4 episodes"
    press(browser, "ArrowRight", 5)
    assert text(browser, readout) == "4: 2 episodes"
    press(browser, "ArrowLeft")
    assert text(browser, readout) == "3: 1 episode"


def test_an_episode_is_stepped_through_with_the_keyboard(browser: chromium.Chromium, tmp_path: Path) -> None:
    opened(browser, walk([3, 5]), tmp_path)
    assert text(browser, ".stage h3") == "Episode 2"
    assert text(browser, ".stage output") == "step 0 of 4"
    browser.run("document.querySelector('.list button').focus()")
    press(browser, "ArrowRight", 3)
    assert text(browser, ".stage output") == "step 3 of 4"
    values = """Object.fromEntries(
        [...document.querySelectorAll('.lane .what')].map(x => [x.firstChild.data, x.lastChild.textContent]))"""
    assert browser.run(values) == {"reward": "3", "action": "1.5", "obs[0]": "1", "obs[1]": "3"}
    press(browser, "End")
    assert text(browser, ".stage output") == "step 4 of 4"
    press(browser, "ArrowRight")
    assert text(browser, ".stage output") == "step 4 of 4"
    press(browser, "ArrowDown")
    assert text(browser, ".stage h3") == "Episode 1"
    assert text(browser, "[aria-current=true] small") == "return 3, 3 steps"
    press(browser, "ArrowDown")
    assert text(browser, ".stage h3") == "Episode 1", "there is no more"
    press(browser, "ArrowUp")
    assert text(browser, ".stage h3") == "Episode 2"


def test_an_episode_is_stepped_through_with_the_mouse(browser: chromium.Chromium, tmp_path: Path) -> None:
    opened(browser, walk([3, 11]), tmp_path)
    click(browser, ".list li:nth-child(2) button")
    assert text(browser, ".stage h3") == "Episode 1"
    click(browser, ".list li:nth-child(1) button")
    click(browser, ".lane svg", along=0.7)
    assert text(browser, ".stage output") == "step 7 of 10"
    click(browser, "[aria-label='Step back']")
    assert text(browser, ".stage output") == "step 6 of 10"
    slider = "document.querySelector('.steps input')"
    browser.run(f"{slider}.value = 9; {slider}.dispatchEvent(new Event('input'))")
    assert text(browser, ".stage output") == "step 9 of 10"
    click(browser, ".lane svg", along=0.6)
    cursor = browser.run("+document.querySelector('.lane .cursor').getAttribute('x1')")
    assert cursor == pytest.approx(600)


def test_the_list_follows_the_keyboard_and_the_page_stays(browser: chromium.Chromium, tmp_path: Path) -> None:
    opened(browser, walk([2] * 40), tmp_path)
    browser.run("document.querySelector('.list').scrollIntoView({behavior: 'instant'})")
    at = browser.run("scrollY")
    browser.run("document.querySelector('.list button').focus({preventScroll: true})")
    press(browser, "ArrowDown", 30)
    inside = """(() => { const a = document.querySelector('[aria-current]').getBoundingClientRect(),
        b = document.querySelector('.list ul').getBoundingClientRect();
        return a.top >= b.top - 1 && a.bottom <= b.bottom + 1 })()"""
    assert browser.run(inside) is True
    assert browser.run("scrollY") == at


def test_episodes_can_be_ordered(browser: chromium.Chromium, tmp_path: Path) -> None:
    opened(browser, walk([3, 5, 4]), tmp_path)
    names = "[...document.querySelectorAll('.list li span')].map(x => x.textContent)"
    assert browser.run(names) == ["Episode 3", "Episode 2", "Episode 1"]
    select = "document.querySelector('.list select')"
    browser.run(f"{select}.value = 'lowest return'; {select}.dispatchEvent(new Event('change'))")
    assert browser.run(names) == ["Episode 1", "Episode 3", "Episode 2"]


def test_a_bar_of_returns_opens_an_episode_with_such_a_return(browser: chromium.Chromium, tmp_path: Path) -> None:
    # The returns of the episodes are 1, 3 and 6.
    opened(browser, walk([2, 3, 4]), tmp_path)
    browser.run("document.querySelector('#episodes svg').focus()")
    press(browser, "ArrowRight")
    browser.press("Enter", 13)
    assert text(browser, ".stage h3") == "Episode 1"


def test_frames_are_those_of_their_steps(browser: chromium.Chromium, tmp_path: Path) -> None:
    opened(browser, pictures(), tmp_path)
    pixel = "document.querySelector('canvas.now').getContext('2d').getImageData(3, 3, 1, 1).data[0]"
    browser.wait(lambda: browser.run("document.querySelector('canvas.now').width") == 12)
    browser.run("document.querySelector('.list button').focus()")
    press(browser, "End")
    assert browser.run(pixel) == 59
    assert text(browser, "figcaption") == "obs.camera: step 59, one of 16 frames of 60 steps"
    press(browser, "Home")
    assert browser.run(pixel) == 0
    click(browser, ".strip button:nth-child(5)")
    at = int(text(browser, ".stage output").split()[1])
    assert 0 < at < 59
    assert browser.run(pixel) == at
    thumbnail = "document.querySelector('.strip button:nth-child(5) canvas').getContext('2d').getImageData(3, 3, 1, 1)"
    assert browser.run(f"{thumbnail}.data[0]") == at


def test_light_and_dark_follow_the_system_until_the_reader_chooses(browser: chromium.Chromium, tmp_path: Path) -> None:
    theme = "document.documentElement.dataset.theme"
    ground = "getComputedStyle(document.body).backgroundColor"
    for scheme in ("dark", "light"):
        browser.prefer(scheme)
        opened(browser, walk([3]), tmp_path)
        assert browser.run(theme) == scheme
    light = browser.run(ground)
    click(browser, "#theme")
    assert browser.run(theme) == "dark"
    assert browser.run(ground) != light
    assert text(browser, "#theme") == "Light"


def test_hostile_names_are_shown_as_text(
    browser: chromium.Chromium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both modules would refuse the name.
    for module in (fields, observers):
        monkeypatch.setattr(module, "NAME_PATTERN", re.compile(".*"))
    replay = rl.ReplayBuffer(9, obs={HOSTILE: 2}, action=(), stats=rl.EpisodeStats(None, reasons=(HOSTILE,)), seed=0)
    for t in range(4):
        replay.add({HOSTILE: [t, 1]}, 0.0, 0.0, t == 3, False, next_obs={HOSTILE: [t + 1, 1]})
    opened(browser, replay, tmp_path)
    assert browser.console == []
    assert browser.run("typeof hacked") == "undefined"
    assert browser.run("document.querySelectorAll('img, main script').length") == 0
    assert f"obs.{HOSTILE}[0]" in text(browser, ".stage")
    assert HOSTILE in text(browser, "#episodes")
    assert f"obs.{HOSTILE}[1] never changes" in text(browser, ".warnings")


def test_a_script_that_is_not_the_pages_own_is_not_run(browser: chromium.Chromium, tmp_path: Path) -> None:
    opened(browser, walk([3]), tmp_path)
    add = "const s = document.createElement('script'); s.textContent = 'var hacked = 1'; document.head.append(s)"
    browser.run(add)
    assert browser.run("typeof hacked") == "undefined"
    browser.wait(lambda: browser.run("1") and browser.console)
    assert "Content Security Policy" in browser.console[0]


@pytest.mark.parametrize("make", [prioritized, pictures])
def test_every_control_has_an_accessible_name(make: Any, browser: chromium.Chromium, tmp_path: Path) -> None:
    opened(browser, make(), tmp_path)
    unnamed = """[...document.querySelectorAll('button, input, select, a, [role=img], nav, section')]
        .filter(x => !(x.getAttribute('aria-label') || x.textContent.trim() || x.getAttribute('aria-labelledby')))
        .map(x => x.outerHTML)"""
    assert browser.run(unnamed) == []
    assert browser.run("document.querySelectorAll('h1').length") == 1
    assert browser.run("[...document.querySelectorAll('nav a')].every(x => document.querySelector(x.hash))") is True


def test_the_parts_of_a_field_unfold(browser: chromium.Chromium, tmp_path: Path) -> None:
    opened(browser, walk([3, 5]), tmp_path)
    shown = (
        "[...document.querySelectorAll('#fields tbody tr')].filter(x => !x.hidden).map(x => x.children[0].textContent)"
    )
    assert browser.run(shown) == ["obs", "action", "reward", "terminated", "truncated"]
    click(browser, "#fields button")
    assert browser.run(shown)[:3] == ["obs", "obs[0]", "obs[1]"]
    assert browser.run("document.querySelector('#fields button').getAttribute('aria-expanded')") == "true"


@pytest.mark.parametrize("make", ALL)
def test_every_plot_has_named_axes_with_ticks(make: Any, browser: chromium.Chromium, tmp_path: Path) -> None:
    opened(browser, make(), tmp_path)
    plots = every(browser, ".plot", "x.closest('.axes') !== null")
    assert all(plots)
    names = every(browser, ".axes", "[...x.querySelectorAll(':scope > .name')].map(name => name.textContent.trim())")
    assert len(names) == len(plots)
    assert all(len(both) == 2 and all(both) for both in names), names
    assert all(count >= 1 for count in every(browser, ".axes .ticks, .axes .yticks", "x.children.length"))
    if make is not empty:
        lanes = every(browser, ".lane:not(.foot)", "x.querySelectorAll('.yticks span').length")
        assert lanes
        assert all(1 <= count <= 2 for count in lanes)
        assert every(browser, ".lane.foot .ticks", "x.children.length > 0") == [True]
    apart = """[...document.querySelectorAll('.ticks')].filter(x => { const boxes = [...x.children].map(
        y => y.getBoundingClientRect()); return boxes.some((box, i) => i && box.left < boxes[i - 1].right) }).length"""
    for width in (1280, 420, 360):
        browser.resize(width, 900)
        try:
            assert browser.run(apart) == 0, "ticks do not cover each other"
            assert browser.run("document.documentElement.scrollWidth") == width
        finally:
            browser.resize(1200, 900)


def test_bars_and_ticks_are_at_their_numbers(browser: chromium.Chromium, tmp_path: Path) -> None:
    opened(browser, walk([2, 2, 2, 2, 3, 4, 4]), tmp_path)
    lengths = "#episodes figure:nth-child(2)"
    assert every(browser, f"{lengths} .bar", "+x.getAttribute('height')") == pytest.approx([98, 98 / 4, 98 / 2])
    assert text(browser, f"{lengths} .ticks") == "234"
    middle = "(b => [b.left + b.width / 2, b.top + b.height / 2])(x.getBoundingClientRect())"
    bars = every(browser, f"{lengths} .bar", "(b => [b.left + b.width / 2, b.top])(x.getBoundingClientRect())")
    across = every(browser, f"{lengths} .ticks span", middle)
    assert [x for x, _ in across] == pytest.approx([x for x, _ in bars], abs=1)
    heights = every(browser, f"{lengths} .yticks span", f"[x.textContent, {middle}[1]]")
    # Four episodes have 2 steps, one has 3 and two have 4.
    assert [dict(heights)[count] for count in ("4", "1", "2")] == pytest.approx([top for _, top in bars], abs=1.5)
    # In the newest episode, obs[1] goes from 0 to 3.
    lane = "[...document.querySelectorAll('.lane')].find(x => x.textContent.startsWith('obs[1]'))"
    assert browser.run(f"[...{lane}.querySelectorAll('.yticks span')].map(x => x.textContent)") == ["0", "3"]
    assert every(browser, ".lane.foot .ticks span", "x.textContent") == ["0", "1", "2", "3"]


def test_unordered_rows_are_numbered_by_their_place_in_the_buffer(browser: chromium.Chromium, tmp_path: Path) -> None:
    opened(browser, unordered(), tmp_path)
    browser.run("document.querySelector('.list li:last-child button').click()")
    assert text(browser, ".stage h3") == "Rows 86 to 149"
    press(browser, "ArrowRight")
    assert text(browser, ".stage output") == "row 87 of 149"
    assert every(browser, ".lane.foot .ticks span", "x.textContent") == ["100", "120", "140"]
    values = "[...document.querySelectorAll('.lane .what')].map(x => x.lastChild.textContent)"
    assert browser.run(values)[-1] == "87", "the observation is the number of its row"


def test_arrow_keys_step_as_soon_as_the_page_is_open(browser: chromium.Chromium, tmp_path: Path) -> None:
    rl.inspect(walk([3, 5]), html=tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    press(browser, "ArrowDown")
    assert text(browser, ".stage h3") == "Episode 2", "it scrolls the page, as elsewhere"
    press(browser, "ArrowRight", 2)
    assert text(browser, ".stage output") == "step 2 of 4"
    seen = "(b => b.top >= 0 && b.top < innerHeight)(document.querySelector('.stage output').getBoundingClientRect())"
    browser.wait(lambda: browser.run(seen))
    press(browser, "ArrowLeft")
    assert text(browser, ".stage output") == "step 1 of 4"
    press(browser, "ArrowDown")
    assert text(browser, ".stage h3") == "Episode 1"


def test_the_page_of_an_empty_buffer_warns(browser: chromium.Chromium, tmp_path: Path) -> None:
    opened(browser, empty(), tmp_path)
    assert text(browser, ".warnings") == "ReplayBuffer is empty: it holds no transitions."
    assert "Nothing looks odd" not in text(browser, "main")


@pytest.mark.parametrize(("truncated", "terminated", "running"), [(11, 0, 1), (7, 0, 1), (37, 3, 1), (199, 1, 0)])
def test_a_warning_and_its_panel_say_the_same(
    truncated: int, terminated: int, running: int, browser: chromium.Chromium, tmp_path: Path
) -> None:
    replay = rl.ReplayBuffer(1000, obs=1, action=(), seed=0)
    ends = [(True, False)] * terminated + [(False, True)] * truncated + [(False, False)] * running
    for episode, end in enumerate(ends):
        for t in range(2):
            flags = end if t == 1 else (False, False)
            replay.add([10 * episode + t], 0.0, float(episode == 3), *flags, next_obs=[10 * episode + t + 1])
    opened(browser, replay, tmp_path)
    warned = re.search(r"(\d[\d.]* %) of episodes end by time limit", text(browser, ".warnings"))
    assert warned is not None
    panel = dict(every(browser, "#episodes .key li", "[x.children[1].textContent, x.children[2].textContent]"))
    assert panel["truncated by a time limit"] == f"{truncated} ({warned[1]})"
    assert panel.get("still running") == (str(running) if running else None)
    zero = re.search(r"The reward is 0 in (\d[\d.]* %) of rows", text(browser, ".warnings"))
    if zero is not None:
        assert f"0 in {zero[1]} of rows" in text(browser, "#actions")
        assert zero[1] in text(browser, ".figures")


def test_the_title_has_the_path_and_the_date(browser: chromium.Chromium, tmp_path: Path) -> None:
    replay = walk([3])
    replay.save(tmp_path / "<run>")
    today = datetime.now().astimezone().strftime("%Y-%m-%d")
    opened(browser, tmp_path / "<run>", tmp_path)
    for contents in (browser.run("document.title"), text(browser, ".lead")):
        assert str(tmp_path / "<run>") in contents
        assert today in contents
    assert browser.run("document.title").startswith("ReplayBuffer · ")
    opened(browser, replay, tmp_path)
    assert "in memory" in text(browser, ".lead")
