"""Prefetched batches: the same batches in the same order, and no thread left running."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import relive as rl
from relive.concurrent import Prefetch
from tests.faults.interrupts import handler, interrupted, points


def filled(rows: int = 100, **options: Any) -> rl.ReplayBuffer:
    replay = rl.ReplayBuffer(100, obs=1, action=(), seed=3, **options)
    for t in range(rows):
        replay.add([float(t)], float(t), 0.0, False, False, [t + 1.0])
    return replay


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "relive.prefetch"]


@pytest.mark.parametrize("sampler", [rl.Uniform(), rl.Prioritized(), rl.WithoutReplacement()])
@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("view", [None, rl.NStep(3, 0.9)])
def test_batches_come_in_the_order_in_which_sample_would_give_them(sampler: Any, depth: int, view: Any) -> None:
    plain, ahead = filled(sampler=sampler), filled(sampler=sampler)
    with rl.prefetch(ahead, 8, view, depth=depth) as batches:
        for _ in range(40):
            assert (next(batches) == plain.sample(8, view)).all()


def test_no_more_than_depth_batches_are_made_ahead() -> None:
    calls = []

    class Slow:
        def sample(self, batch_size: int, view: Any = None, *, device: Any = None) -> Any:
            calls.append(batch_size)
            return len(calls)

    with rl.prefetch(Slow(), 8, depth=3) as batches:  # pyright: ignore[reportArgumentType]
        assert [next(batches), next(batches)] == [1, 2]
        deadline = time.monotonic() + 10
        while len(calls) < 5 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.05)
        assert len(calls) == 5


def test_an_error_comes_in_its_turn_and_then_it_goes_on() -> None:
    replay = filled(0)
    with rl.prefetch(replay, 4) as batches:
        for _ in range(2):
            with pytest.raises(rl.NotReadyError, match="sample: expected at least 1 stored transition, got 0"):
                next(batches)
        replay.add([0.0], 0.0, 0.0, False, False, [1.0])
        assert next(batches)["next_obs"].tolist() == [[1.0]] * 4


def test_a_batch_is_where_it_was_asked_for() -> None:
    with rl.prefetch(filled(), 4, device="meta") as batches:
        assert next(batches)["obs"].device == torch.device("meta")


@pytest.mark.parametrize("ending", ["close", "forget", "twice"])
def test_the_thread_ends_with_the_iterator(ending: str) -> None:
    assert not workers()
    batches = rl.prefetch(filled(), 4)
    assert not workers(), "a thread before anybody asked"
    next(batches)
    assert len(workers()) == 1
    if ending == "forget":
        del batches
        gc.collect()
    else:
        batches.close()
        batches.close()
        assert list(batches) == []
    assert not workers()


def test_closing_wakes_somebody_who_waits_for_a_batch() -> None:
    entered, ended = threading.Event(), threading.Event()

    class Stuck:
        def sample(self, batch_size: int, view: Any = None, *, device: Any = None) -> Any:
            entered.set()
            ended.wait(30)

    batches = rl.prefetch(Stuck(), 4)  # pyright: ignore[reportArgumentType]
    taker = threading.Thread(target=lambda: list(batches))
    taker.start()
    assert entered.wait(10)
    threading.Timer(0.1, ended.set).start()
    batches.close()
    taker.join(10)
    assert not taker.is_alive()


@pytest.mark.parametrize(("arguments", "message"), [((0,), "prefetch"), ((4, None, 0), "depth: expected a positive")])
def test_invalid_arguments_are_refused_at_the_call(arguments: Any, message: str) -> None:
    with pytest.raises((rl.SchemaError, ValueError), match=message):
        rl.prefetch(filled(), *arguments)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupted_call_leaves_batches_to_come_and_a_thread_that_ends() -> None:
    """Signals begin with the second batch, because a signal may break the start of a thread in the standard library."""
    replay = filled()

    def start() -> Prefetch:
        batches = rl.prefetch(replay, 4)
        next(batches)
        return batches

    def finish(batches: Prefetch) -> None:
        next(batches, None)
        batches.close()

    calls: dict[str, Callable[[Prefetch], Any]] = {"next": next, "close": Prefetch.close}
    with handler():
        for name, call in calls.items():
            stopped = 0
            for point in points(partial(call, start())):
                batches = start()
                stopped += interrupted(partial(call, batches), point)
                other = threading.Thread(target=finish, args=(batches,), daemon=True)
                other.start()
                other.join(10)
                assert not other.is_alive(), f"{name} was interrupted at {point}: another call waits for ever"
            assert stopped > 5
    gc.collect()
    assert not workers()


def test_a_warning_names_the_line_that_asks_for_a_batch() -> None:
    replay = rl.ReplayBuffer(100, obs=1, action=(), seed=3)
    for t in range(65):
        replay.add([float(t)], 0.0, 0.0, False, False, [-1.0])
    with rl.prefetch(replay, 4) as batches, pytest.warns(rl.DataWarning) as warned:
        next(batches)
    assert [warning.filename for warning in warned] == [__file__]
