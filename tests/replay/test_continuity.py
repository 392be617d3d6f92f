"""One `DataWarning` for discontinuous steps and for reset observations passed as next ones; none for correct data."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import relive as rl
from relive.replay.continuity import StepContinuityStats, count_stored_continuity
from tests.tiers import select

CUTS = r"obs: expected steps that start where the step before led, got ([\d,]+) of ([\d,]+) that do not\."
RESETS = (
    r"next_obs: expected the observation that an episode ended with, .* at all 8 ends\. Use add_step, or .*final_obs"
)
Step = tuple[float, bool, bool, float]
"""obs, terminated, truncated, next_obs."""


def replay(**options: Any) -> rl.ReplayBuffer:
    return rl.ReplayBuffer(options.pop("capacity", 1000), obs=1, action=(), seed=0, **options)


def add(buffer: rl.ReplayBuffer, step: Step) -> None:
    obs, terminated, truncated, next_obs = step
    buffer.add([obs], 0.0, 0.0, terminated, truncated, [next_obs])


def add_all(buffer: rl.ReplayBuffer, steps: Iterable[Step]) -> None:
    for step in steps:
        add(buffer, step)


def block(steps: list[Step]) -> dict[str, np.ndarray]:
    obs, terminated, truncated, next_obs = (np.array(part) for part in zip(*steps, strict=True))
    zeros = np.zeros(len(steps), np.float32)
    fields = {"obs": obs[:, None], "action": zeros, "reward": zeros, "terminated": terminated, "truncated": truncated}
    return fields | {"next_obs": next_obs[:, None]}


def unordered(count: int) -> Iterator[Step]:
    """Yield the rows of a shuffled dataset."""
    for t in np.random.default_rng(0).permutation(10 * count)[:count]:
        yield float(t), False, False, t + 0.5


def resets_as_next(count: int, length: int = 5, *, truncated: bool = False) -> Iterator[Step]:
    """Yield the steps of a loop that passes the observation of a SAME_STEP environment as the next observation."""
    for t in range(count):
        end, episode = t % length == length - 1, t // length
        following = 100.0 * (episode + 1) if end else 100.0 * episode + t % length + 1
        yield 100.0 * episode + t % length, end and not truncated, end and truncated, following


def honest(count: int, length: int = 5) -> Iterator[Step]:
    for t in range(count):
        start = 100.0 * (t // length) + t % length
        yield start, t % length == length - 1, False, start + 1


def state_of(buffer: rl.ReplayBuffer) -> dict[str, torch.Tensor]:
    return {
        name: tensor.clone()
        for name, tensor in {**buffer.state_dict()["rows"], **buffer.state_dict()["arrays"]}.items()
    }


def test_a_chain_that_is_mostly_cut_is_spoken_of_once_with_figures_and_remedies(backend: str) -> None:
    buffer, steps = replay(), list(unordered(200))
    # The first step follows no step, so that 64 steps are counted.
    for step in steps[:65]:
        add(buffer, step)
    with pytest.warns(rl.DataWarning, match=CUTS) as caught:
        add(buffer, steps[65])
    message = str(caught[0].message)
    assert "got 64 of 64" in message
    for remedy in ('next_obs="stored"', "normalise when sampling", "each player of turn-based self-play a column"):
        assert remedy in message
    assert caught[0].filename == __file__
    add_all(buffer, steps[66:])
    assert len(buffer) == 200


def test_a_moving_normaliser_is_noticed(backend: str) -> None:
    buffer, norm = replay(num_envs=2, capacity=2000), rl.RunningNorm(1)
    random, flags = np.random.default_rng(0), np.zeros(2, bool)

    def live(obs: np.ndarray) -> None:
        for _ in range(34):
            following = obs + random.normal(size=(2, 1))
            norm.update(torch.as_tensor(obs))
            seen = norm(torch.as_tensor(obs))
            buffer.add(seen, np.zeros(2), np.zeros(2), flags, flags, norm(torch.as_tensor(following)))
            obs = following

    with pytest.warns(rl.DataWarning, match="got 64 of 64"):
        live(np.zeros((2, 1)))


@pytest.mark.parametrize("call", ["add", "extend", "sample", "save", "check"])
def test_every_call_that_speaks_does_so_before_it_changes_anything(backend: str, call: str, tmp_path: Path) -> None:
    buffer, steps = replay(stats=rl.EpisodeStats(None)), list(unordered(301))
    buffer.extend(block(steps[:300]))
    calls: dict[str, Callable[[], Any]] = {
        "add": lambda: add(buffer, steps[300]),
        "extend": lambda: buffer.extend(block(steps[300:])),
        "sample": lambda: buffer.sample(4),
        "save": lambda: buffer.save(tmp_path),
        "check": buffer.check,
    }
    before = state_of(buffer)
    with pytest.raises(rl.DataWarning, match="got 299 of 299"):
        calls[call]()
    assert all(torch.equal(tensor, state_of(buffer)[name]) for name, tensor in before.items())
    assert not list(tmp_path.iterdir())
    calls[call]()
    assert len(buffer) == 300 + (call in ("add", "extend"))


def test_staged_fields_wait_for_the_call_that_is_repeated(backend: str) -> None:
    buffer, steps = replay(), list(unordered(66))
    add_all(buffer, steps[:65])
    obs, _, _, following = steps[65]
    buffer.stage(obs=[obs])
    rest: dict[str, Any] = {"action": 0.0, "reward": 0.0, "terminated": False, "truncated": False}
    with pytest.raises(rl.DataWarning):
        buffer.add(**rest, next_obs=[following])
    buffer.add(**rest, next_obs=[following])
    assert float(buffer[buffer.ids()[-1:]]["obs"]) == obs


def test_the_warning_is_issued_without_the_lock(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, free = replay(), []

    def look(*args: Any, **kwargs: Any) -> None:
        other = threading.Thread(target=lambda: free.append(len(buffer)), daemon=True)
        other.start()
        other.join(5)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", look)
        add_all(buffer, unordered(100))
    assert free == [65]


def test_turn_based_self_play_in_one_column_is_told_to_use_two(backend: str) -> None:
    def turns(count: int) -> Iterator[tuple[int, float, float]]:
        for t in range(count):
            player = t % 2
            yield player, 1000.0 * player + t, 1000.0 * player + t + 2

    with pytest.warns(rl.DataWarning, match="each player of turn-based self-play a column of its own"):
        add_all(replay(), ((obs, False, False, following) for _, obs, following in turns(100)))
    apart = replay(num_envs=2)
    for player, obs, following in turns(200):
        apart.add([[obs]], [0.0], [0.0], [False], [False], [[following]], env_ids=[player])
    assert (apart.sample(50, rl.Sequence(8))["mask"].sum(1) > 1).any()


@pytest.mark.parametrize("autoreset", [None, "SAME_STEP", "DISABLED"])
def test_reset_observations_passed_as_next_ones_are_noticed(backend: str, autoreset: str | None) -> None:
    buffer, steps = replay(autoreset=autoreset), list(resets_as_next(100))
    add_all(buffer, steps[:41])
    with pytest.warns(rl.DataWarning, match=RESETS) as caught:
        add(buffer, steps[41])
    assert caught[0].filename == __file__
    add_all(buffer, steps[42:])
    assert len(buffer) == 100


def test_they_are_noticed_in_blocks_and_where_time_limits_end_episodes(backend: str) -> None:
    together = replay(autoreset="SAME_STEP")
    together.extend(block(list(resets_as_next(41, truncated=True))))
    with pytest.warns(rl.DataWarning, match=RESETS):
        together.check()
    buffer = replay(num_envs=2, autoreset="SAME_STEP", capacity=2000)
    columns = [block(list(resets_as_next(21, truncated=True))) for _ in range(2)]
    for t in range(21):
        buffer.add(**{name: np.stack([column[name][t] for column in columns]) for name in columns[0]})
    with pytest.warns(rl.DataWarning, match=RESETS):
        buffer.check()


def test_one_end_that_leads_to_its_own_observation_is_enough_to_trust_all(backend: str) -> None:
    buffer = replay()
    add_all(buffer, [*honest(10), *((obs + 1e4, a, b, after + 1e4) for obs, a, b, after in resets_as_next(200))])


@pytest.mark.parametrize("mistaken", [True, False])
def test_cartpole_that_resets_in_the_same_step(backend: str, mistaken: bool) -> None:
    envs = gym.make_vec("CartPole-v1", 4, "sync", vector_kwargs={"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP})
    buffer = rl.ReplayBuffer.for_env(envs, 4000, seed=0)
    obs, _ = envs.reset(seed=0)
    envs.action_space.seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(150):
            action = envs.action_space.sample()
            step = envs.step(action)
            if mistaken:
                buffer.add(obs, action, *step[1:4], step[0])
            else:
                buffer.add_step(obs, action, step)
            obs = step[0]
    envs.close()
    said = [str(each.message) for each in caught if each.category is rl.DataWarning]
    assert len(said) == mistaken
    assert not mistaken or "final_obs" in said[0]


def constant(count: int) -> Iterator[Step]:
    for t in range(count):
        yield 7.0, t % 5 == 4, False, 7.0


def truncate_and_continue(count: int) -> Iterator[Step]:
    for t in range(count):
        yield float(t), False, t % 5 == 4, t + 1.0


def bandit(count: int) -> Iterator[Step]:
    for t in range(count):
        yield float(t), True, False, t + 1.0


def bandit_without_next(count: int) -> Iterator[Step]:
    for t in range(count):
        yield float(t), True, False, float(t)


def one_step_episodes(count: int) -> Iterator[Step]:
    for t in range(count):
        yield 10.0 * t, t % 2 == 0, t % 2 == 1, 10.0 * t + 1


def every_second_step_cut(count: int) -> Iterator[Step]:
    for t in range(count):
        yield 10.0 * (t // 2) + t % 2, False, False, 10.0 * (t // 2) + t % 2 + 1


SILENT = [
    honest,
    constant,
    truncate_and_continue,
    bandit,
    bandit_without_next,
    one_step_episodes,
    every_second_step_cut,
]


@pytest.mark.parametrize("stream", select(truncate_and_continue, bandit, every_second_step_cut, of=SILENT))
@pytest.mark.parametrize("capacity", select(1000, of=[1, 1000]))
def test_honest_streams_stay_silent(backend: str, stream: Callable[[int], Iterator[Step]], capacity: int) -> None:
    buffer = replay(capacity=capacity)
    add_all(buffer, stream(120))
    together = replay(capacity=capacity)
    steps = list(stream(120))
    for start in range(0, 120, 40):
        together.extend(block(steps[start : start + 40]))
    together.extend(block(list(stream(120))))
    pair = replay(capacity=2 * capacity, num_envs=2)
    for step in steps:
        for env in (1, 0):
            obs, terminated, truncated, following = step
            pair.add([[obs + env]], [0.0], [0.0], [terminated], [truncated], [[following + env]], env_ids=[env])
    for obs, terminated, truncated, following in steps:
        both = [[obs + 3000], [obs + 3000]]
        pair.add(both, [0.0] * 2, [0.0] * 2, [terminated] * 2, [truncated] * 2, [[following + 3000]] * 2)


@pytest.mark.parametrize("autoreset", ["NEXT_STEP", "SAME_STEP", "DISABLED"])
def test_every_way_to_reset_is_silent_through_add_step(backend: str, autoreset: str) -> None:
    mode = gym.vector.AutoresetMode[autoreset]
    envs = gym.make_vec("CartPole-v1", 4, "sync", vector_kwargs={"autoreset_mode": mode})
    buffer = rl.ReplayBuffer.for_env(envs, 4000, seed=0)
    obs, _ = envs.reset(seed=0)
    envs.action_space.seed(0)
    for _ in range(200):
        action = envs.action_space.sample()
        step = envs.step(action)
        buffer.add_step(obs, action, step)
        obs, ended = step[0], step[2] | step[3]
        if autoreset == "DISABLED" and ended.any():
            obs, _ = envs.reset(options={"reset_mask": ended})
    envs.close()


def test_next_step_is_never_asked_about_ends(backend: str) -> None:
    """Under NEXT_STEP, the observation after an end is the final one, and the following row resets."""
    buffer = replay(autoreset="NEXT_STEP", num_envs=1)
    obs = 0.0
    for t in range(300):
        buffer.add([[obs]], [0.0], [0.0], [t % 3 == 1], [False], [[t + 1.0]])
        obs = t + 1.0


def test_unordered_rows_with_their_own_next_observations_are_silent(backend: str) -> None:
    buffer = replay(next_obs="stored")
    add_all(buffer, unordered(200))
    buffer.extend(block(list(unordered(200))))
    add_all(buffer, resets_as_next(100))


def test_abandoned_episodes_are_silent(backend: str) -> None:
    buffer = replay()
    for step in unordered(200):
        add(buffer, step)
        buffer.cut()


def step_of(random: np.random.Generator, obs: float) -> Step:
    kind = random.integers(6)
    start = obs if kind else float(random.integers(3))
    return start, bool(random.random() < 0.2), bool(random.random() < 0.2), float(random.integers(3))


def count_every_way(make: Callable[[], rl.ReplayBuffer], fields: dict[str, np.ndarray]) -> set[StepContinuityStats]:
    """Return the counts of both backends for 60 steps: as single steps, and as blocks of 7 and of 60 steps."""
    counts = set()
    for forced in (False, True):
        with rl.kernels.force_torch() if forced else nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore", rl.DataWarning)
            for size in (1, 7, 60):
                buffer = make()
                for start in range(0, 60, size):
                    part = {name: values[start : start + size] for name, values in fields.items()}
                    if size == 1:
                        buffer.add(**{name: values[0] for name, values in part.items()})
                    else:
                        buffer.extend(part)
                counts.add(chains_of(buffer))
    return counts


@pytest.mark.parametrize("autoreset", [None, "NEXT_STEP", "SAME_STEP"])
@pytest.mark.parametrize("seed", select(0, 1, of=range(8)))
def test_blocks_and_backends_count_what_single_steps_count(autoreset: str | None, seed: int) -> None:
    """Observations are few, so that by chance ends lead to the next first observation or to their own."""
    random = np.random.default_rng(seed)
    steps, obs = [], 0.0
    for _ in range(60):
        steps.append(step_of(random, obs))
        obs = steps[-1][3]
    assert len(count_every_way(lambda: replay(autoreset=autoreset, capacity=50), block(steps))) == 1


def stacked_steps(random: np.random.Generator, k: int, pad: str, next_step: bool) -> Iterator[tuple[Any, ...]]:
    """Yield steps of few different frames, so that many ends lead to a stack that differs only in older frames."""

    def start() -> list[float]:
        frame = float(random.integers(2))
        return [frame if pad == "repeat" else 0.0] * (k - 1) + [frame]

    stack = start()
    while True:
        led = [*stack[1:], float(random.integers(2))]
        terminated, truncated = random.random() < 0.15, random.random() < 0.15
        yield stack, terminated, truncated, led
        is_over = terminated or truncated
        if is_over and next_step:
            fresh = start()
            yield led, False, False, fresh
            led = fresh
        elif is_over or random.random() < 0.1:
            led = start()
        stack = led


@pytest.mark.parametrize("autoreset", [None, "NEXT_STEP", "SAME_STEP"])
@pytest.mark.parametrize("pad", ["repeat", "zero"])
@pytest.mark.parametrize("seed", select(1, of=range(6)))
def test_stacked_frames_are_counted_as_whole_stacks(autoreset: str | None, pad: Any, seed: int) -> None:
    random, k = np.random.default_rng(seed), 2 + seed % 3
    steps = list(itertools.islice(stacked_steps(random, k, pad, autoreset == "NEXT_STEP"), 60))
    fields = block(steps)
    stacks = {name: fields[name].squeeze(1) for name in ("obs", "next_obs")}
    stack = rl.Stacked(rl.Field(()), k, pad=pad)
    counts = count_every_way(lambda: rl.ReplayBuffer(50, obs=stack, action=(), autoreset=autoreset), fields | stacks)
    assert len(counts) == 1


def chains_of(buffer: rl.ReplayBuffer) -> StepContinuityStats:
    store: Any = buffer.storage
    return store.read_continuity_stats()


def test_other_devices_report_in_check(monkeypatch: pytest.MonkeyPatch) -> None:
    with rl.kernels.force_torch():
        for stream, expected in ((unordered, CUTS), (resets_as_next, "at all 19 ends")):
            buffer: Any = replay()
            # On a device, writes do not count, to save launches.
            buffer.storage.counter.is_on = False
            add_all(buffer, stream(100))
            with pytest.warns(rl.DataWarning, match=expected):
                buffer.check()
            buffer.check()
        for stream in SILENT:
            buffer = replay()
            buffer.storage.counter.is_on = False
            add_all(buffer, stream(100))
            buffer.check()


def test_what_is_stored_shows_what_was_counted(backend: str) -> None:
    for stream in (honest, unordered, resets_as_next, truncate_and_continue, every_second_step_cut):
        buffer = replay()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", rl.DataWarning)
            add_all(buffer, stream(100))
        assert count_stored_continuity(buffer.storage.rows) == chains_of(buffer), stream


@pytest.mark.parametrize("autoreset", [None, "SAME_STEP", "DISABLED", "NEXT_STEP"])
def test_stored_time_limits_are_counted_in_every_mode(autoreset: str | None, backend: str) -> None:
    def count(steps: Iterator[Step]) -> tuple[int, int]:
        buffer = replay(autoreset=autoreset)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", rl.DataWarning)
            add_all(buffer, steps)
        stats = count_stored_continuity(buffer.storage.rows)
        return stats.time_limits, stats.time_limits_to_start

    # The last of 20 ends is not followed by a step. Under NEXT_STEP the following row resets.
    expected = 0 if autoreset == "NEXT_STEP" else 19
    assert count(resets_as_next(100, truncated=True)) == (expected, expected)
    assert count(truncate_and_continue(100)) == (expected, expected)
    assert count((obs, False, end, next_obs) for obs, end, _, next_obs in honest(100)) == (expected, 0)
    assert count(honest(100)) == (0, 0)


def one_honest_end(count: int) -> Iterator[Step]:
    """Yield `resets_as_next`, but for the first end, whose `next_obs` is the final observation."""
    ends = 0
    for obs, terminated, truncated, next_obs in resets_as_next(count):
        ends += terminated
        yield obs, terminated, truncated, -1.0 if terminated and ends == 1 else next_obs


def test_inspect_tells_the_figures(backend: str) -> None:
    for stream, expected in (
        (unordered, "99 of 99 steps do not start where the step before led"),
        (resets_as_next, "All 19 ends lead to the observation that the next episode starts with"),
        (partial(resets_as_next, truncated=True), "19 of 19 time limits lead to the observation that the next episode"),
        (one_honest_end, "18 of 19 ends lead to the observation that the next episode starts with"),
    ):
        buffer = replay()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", rl.DataWarning)
            add_all(buffer, stream(100))
        report = rl.inspect(buffer)
        assert any(expected in warning for warning in report.warnings), report.warnings
    for stream in SILENT:
        buffer = replay()
        add_all(buffer, stream(100))
        assert not any("the step before led" in warning for warning in rl.inspect(buffer).warnings)
        assert not any("ends lead to" in warning for warning in rl.inspect(buffer).warnings)


def test_counters_are_not_saved(backend: str, tmp_path: Any) -> None:
    buffer = replay()
    steps = list(unordered(128))
    add_all(buffer, steps[:64])
    buffer.save(tmp_path)
    loaded = rl.load(tmp_path)
    assert isinstance(loaded, rl.ReplayBuffer)
    for step in steps[64:]:
        # The counted steps are these 64: the first continues the last row of the file.
        add(loaded, step)
    with pytest.warns(rl.DataWarning, match="got 64 of 64"):
        loaded.check()


@pytest.mark.parametrize(("stream", "expected"), [(unordered, "got 64 of 64"), (resets_as_next, RESETS)])
def test_the_adapter_of_stable_baselines3_speaks_at_its_callers_line(
    stream: Callable[[int], Iterator[Step]], expected: str
) -> None:
    pytest.importorskip("stable_baselines3", reason="needs Stable-Baselines3: pip install '.[sb3]'")
    from relive.compat.stable_baselines3 import ReplayBuffer  # noqa: PLC0415 (only where it is installed)

    box = gym.spaces.Box(-np.inf, np.inf, (1,))
    buffer = ReplayBuffer(1000, box, box, "cpu", next_obs="shared")

    def add_to(obs: float, end: bool, _: bool, following: float) -> None:
        there, then = (np.array([[place]], np.float32) for place in (obs, following))
        buffer.add(there, then, np.zeros((1, 1)), np.zeros(1), np.array([end]), [{}])

    def live() -> None:
        for step in stream(100):
            add_to(*step)

    with pytest.warns(rl.DataWarning, match=expected) as caught:
        live()
    assert caught[0].filename == __file__
    assert buffer.size() == 100


def test_the_client_of_a_service_speaks_for_its_shards() -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")
    from tests.distributed.local import local_service, make_plan, make_steps  # noqa: PLC0415 (they import Ray)

    service, _ = local_service(make_plan(1000, 4, 2))
    honest_steps = make_steps(range(4), 0, 100, length=5)
    service.extend(honest_steps)
    service.flush()
    service, _ = local_service(make_plan(1000, 4, 2))
    broken = honest_steps | {"next_obs": honest_steps["next_obs"] + 0.5, "terminated": honest_steps["truncated"]}

    def push() -> None:
        for _ in range(3):
            service.extend(broken)
            service.flush()

    with pytest.warns(rl.DataWarning, match="got 198 of 198") as caught:
        push()
    assert len(caught) == 2
    assert len(service) == 4 * 125
