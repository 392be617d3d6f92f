"""Writers and samplers wait for each other: the ratio holds, no call waits forever, and errors give the reason."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relive as rl
from relive.concurrent import Handle
from tests.faults.processes import CONTEXT


def buffer(**options: Any) -> rl.ReplayBuffer:
    return rl.ReplayBuffer(1000, obs=1, action=(), seed=0, **options)


def add(limit: rl.RateLimit, count: int = 1) -> None:
    for _ in range(count):
        limit.add([0.0], 0.0, 0.0, False, False, [0.0])


class TestWaiting:
    def test_sampling_begins_with_min_size_transitions(self) -> None:
        limit = rl.RateLimit(buffer(), samples_per_insert=1, min_size=5, tolerance=50, timeout=0.01)
        add(limit, 4)
        with pytest.raises(TimeoutError, match=r"sample: waited .* s\. Sampling begins with 5 stored tr.* there are 4"):
            limit.sample(1)
        add(limit)
        assert len(limit.sample(1)) == 1
        assert (limit.inserted, limit.sampled, len(limit)) == (5, 1, 5)

    def test_samples_stay_within_the_tolerance_of_the_ratio(self) -> None:
        limit = rl.RateLimit(buffer(), samples_per_insert=4, min_size=10, tolerance=20, timeout=0)
        random = np.random.default_rng(0)
        for _ in range(3000):
            with contextlib.suppress(TimeoutError):
                limit.sample(int(random.integers(1, 20))) if random.random() < 0.5 else add(limit)
            if limit.sampled:
                assert abs(4 * (limit.inserted - 10) - limit.sampled) <= 20
        assert limit.inserted > 500

    def test_the_timeout_error_names_the_side_that_is_ahead(self) -> None:
        limit = rl.RateLimit(buffer(), samples_per_insert=2, min_size=1, tolerance=4, timeout=0)
        add(limit, 3)
        counts = r"\(3 inserts and 0 samples, at 2 samples per insert after the first 1\)"
        with pytest.raises(TimeoutError, match=rf"insert: waited .* Inserts are ahead {counts}: sample more\."):
            add(limit)
        limit.sample(6)
        with pytest.raises(TimeoutError, match=r"sample: waited .* Samples are ahead .*: add more\."):
            limit.sample(3)
        assert (limit.inserted, limit.sampled, len(limit.replay)) == (3, 6, 3)

    def test_a_call_that_fails_is_not_counted(self) -> None:
        limit = rl.RateLimit(buffer(), samples_per_insert=2, tolerance=8)
        with pytest.raises(rl.SchemaError, match="reward"):
            limit.add([0.0], 0.0, [1.0, 2.0], False, False, [1.0])
        assert limit.inserted == 0

    def test_steps_of_several_environments_and_blocks_count_their_rows(self) -> None:
        replay = buffer(num_envs=4)
        limit = rl.RateLimit(replay, samples_per_insert=1, tolerance=100)
        obs, number, flag = np.zeros((4, 1)), np.zeros(4), np.zeros(4, bool)
        limit.add(obs, number, number, flag, flag, obs + 1)
        limit.add(obs[:2], number[:2], number[:2], flag[:2], flag[:2], obs[:2] + 1, env_ids=[1, 3])
        block = {"obs": obs, "action": number, "reward": number, "terminated": flag, "truncated": flag}
        block = {name: np.stack([value] * 5) for name, value in block.items()}
        limit.extend({**block, "next_obs": block["obs"] + 1})
        assert limit.inserted == 4 + 2 + 20 == len(replay)

    def test_threads_keep_the_ratio(self) -> None:
        limit = rl.RateLimit(buffer(), samples_per_insert=8, min_size=50, tolerance=400, timeout=30)
        adder = threading.Thread(target=add, args=(limit, 560))
        adder.start()
        for _ in range(60):
            limit.sample(64)
        adder.join(30)
        assert not adder.is_alive()
        assert abs(8 * (limit.inserted - 50) - limit.sampled) <= 400 + 64


def _adding(handle: Handle) -> None:
    limit = rl.RateLimit(rl.connect(handle), samples_per_insert=4, min_size=10, tolerance=100, timeout=60)
    for t in range(110):
        limit.add(np.array([[t]]), [0.0], [0.0], [False], [False], np.array([[t + 1]]))


@pytest.mark.skipif(not hasattr(rl.kernels.native_core(), "ProcessLock"), reason="needs Linux and a compiler")
def test_processes_keep_the_ratio() -> None:
    replay = rl.ReplayBuffer(1000, 1, (), num_envs=1, device=rl.Memory.shared(), seed=0)
    limit = rl.RateLimit(replay, samples_per_insert=4, min_size=10, tolerance=100, timeout=60)
    process: Any = CONTEXT.Process(target=_adding, args=(replay.handle(),))
    process.start()
    for _ in range(20):
        limit.sample(15)
        assert limit.waits_for(kind="sample", rows=1) is None or limit.inserted <= 110
    process.join(60)
    assert process.exitcode == 0
    assert (limit.inserted, limit.sampled) == (110, 300)


class TestClosing:
    def test_calls_after_close_raise_and_the_buffer_stays_open(self) -> None:
        limit = rl.RateLimit(buffer(sampler=rl.Prioritized()), samples_per_insert=4, tolerance=100)
        add(limit, 3)
        index = limit.sample(2)["index"]
        limit.close()
        limit.close()
        block = {name: np.zeros((1, 1) if "obs" in name else 1) for name in ("obs", "action", "reward", "next_obs")}
        block |= {name: np.zeros(1, bool) for name in ("terminated", "truncated")}
        for call in (
            lambda: add(limit),
            lambda: limit.add_step([0.0], 0.0, ([0.0], 0.0, False, False, {})),
            lambda: limit.extend(block),
            lambda: limit.sample(1),
            lambda: limit.update_priority(index, [1.0, 1.0]),
            lambda: limit.write(index),
            lambda: add(rl.RateLimit(limit.replay, samples_per_insert=1)),
        ):
            with pytest.raises(
                rl.ClosedError, match=r": expected a RateLimit that is open, got one after close\(\)\. End"
            ):
                call()
        assert (limit.inserted, limit.sampled, len(limit.replay.sample(4))) == (3, 2, 4)

    def test_a_checkpoint_does_not_keep_it(self, tmp_path: Path) -> None:
        limit = rl.RateLimit(buffer(), samples_per_insert=4, tolerance=100)
        add(limit, 3)
        limit.close()
        limit.replay.save(tmp_path)
        loaded: Any = rl.load(tmp_path)
        add(rl.RateLimit(loaded, samples_per_insert=4, tolerance=100))

    def test_threads_that_wait_return_at_once(self) -> None:
        limit = rl.RateLimit(buffer(), samples_per_insert=1, min_size=1, tolerance=2)
        add(limit, 3)
        ended: list[type[BaseException]] = []

        def wait(call: Callable[[], object]) -> None:
            try:
                call()
            except BaseException as error:
                ended.append(type(error))

        learner = rl.RateLimit(buffer(), samples_per_insert=1, min_size=5, tolerance=50)
        calls = [lambda: add(limit), lambda: add(limit), lambda: learner.sample(1)]
        threads = [threading.Thread(target=wait, args=(call,), daemon=True) for call in calls]
        for thread in threads:
            thread.start()
        threads[0].join(0.1)
        assert all(thread.is_alive() for thread in threads)
        limit.close()
        learner.close()
        for thread in threads:
            thread.join(10)
        assert ended == [rl.ClosedError] * 3

    def test_a_buffer_that_is_closed_ends_the_waiting_too(self) -> None:
        limit = rl.RateLimit(buffer(), samples_per_insert=1, min_size=1, tolerance=2)
        add(limit, 3)
        closer = threading.Timer(0.05, limit.replay.close)
        closer.start()
        with pytest.raises(
            rl.ClosedError, match=r"buffer: expected use before close\(\), got use after it\. Make a new"
        ):
            add(limit)
        with pytest.raises(RuntimeError):
            limit.replay.sample(1)


def _waiting(handle: Handle, ready: Any, answers: Any) -> None:
    limit = rl.RateLimit(rl.connect(handle), samples_per_insert=1, min_size=1, tolerance=2)
    ready.release()
    try:
        while True:
            limit.add(np.zeros((1, 1)), [0.0], [0.0], [False], [False], np.ones((1, 1)))
    except rl.ClosedError as error:
        answers.put(str(error))


@pytest.mark.skipif(not hasattr(rl.kernels.native_core(), "ProcessLock"), reason="needs Linux and a compiler")
def test_processes_that_wait_return_at_once_after_close() -> None:
    replay = rl.ReplayBuffer(1000, 1, (), num_envs=1, device=rl.Memory.shared(), seed=0)
    limit = rl.RateLimit(replay, samples_per_insert=1, min_size=1, tolerance=2)
    ready, answers = CONTEXT.Semaphore(0), CONTEXT.Queue()
    processes: list[Any] = [CONTEXT.Process(target=_waiting, args=(replay.handle(), ready, answers)) for _ in range(2)]
    for process in processes:
        process.start()
    for _ in processes:
        assert ready.acquire(timeout=120)
    while limit.waits_for("insert", 1) is None:
        time.sleep(0.01)
    assert all(process.is_alive() for process in processes)
    limit.close()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert [answers.get(timeout=10).split(":")[0] for _ in processes] == ["insert", "insert"]


class TestRefusals:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"samples_per_insert": 0}, "samples_per_insert: expected a finite number above 0, got 0"),
            ({"samples_per_insert": float("nan")}, "samples_per_insert: expected a finite number above 0"),
            ({"samples_per_insert": True}, "samples_per_insert: expected a finite number above 0, got True"),
            ({"samples_per_insert": 1, "min_size": 0}, "min_size: expected a positive int"),
            (
                {"samples_per_insert": 1, "min_size": 1001},
                "min_size: expected at most the capacity 1000, got 1001. Low",
            ),
            ({"samples_per_insert": 1, "tolerance": -1}, "tolerance: expected a finite number of at least 0"),
            ({"samples_per_insert": 1, "timeout": -1}, "timeout: expected a finite number of at least 0"),
            ({"samples_per_insert": 8, "tolerance": 4}, "tolerance: expected at least 4.5 for 1 inserts and 1 samples"),
        ],
    )
    def test_settings_that_cannot_work_are_refused(self, settings: Any, message: str) -> None:
        with pytest.raises(rl.SchemaError, match=message):
            rl.RateLimit(buffer(), **settings)

    def test_a_batch_that_could_make_both_sides_wait_is_refused(self) -> None:
        limit = rl.RateLimit(buffer(), samples_per_insert=2, tolerance=10, timeout=0)
        add(limit, 2)
        with pytest.raises(rl.SchemaError, match="tolerance: expected at least 129 for 1 inserts and 256 samples at"):
            limit.sample(256)
        assert limit.sampled == 0


@pytest.mark.parametrize("ratio", [1e308, 1e300, 2e9])
def test_a_ratio_too_large_to_limit_anything_is_refused(ratio: float) -> None:
    with pytest.raises(rl.SchemaError, match="samples_per_insert: expected at most 1e"):
        rl.RateLimit(buffer(), samples_per_insert=ratio)
