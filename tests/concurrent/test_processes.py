"""A replay buffer in shared memory: handles, several buffers on one memory, and recovery of half-written steps."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import relive as rl
from relive.concurrent import Handle
from relive.replay.native_backend import NativeReader
from relive.storage.shared import SharedAddress
from tests.tiers import select

pytestmark = pytest.mark.skipif(
    not hasattr(rl.kernels.native_core(), "ProcessLock"), reason="needs Linux and a compiler"
)


def shared(capacity: int = 12, **options: Any) -> rl.ReplayBuffer:
    options = {"num_envs": 2, "obs": 1, "action": (), "seed": 0, **options}
    return rl.ReplayBuffer(capacity, device=rl.Memory.shared(), **options)


def steps(replay: rl.ReplayBuffer, first: int, count: int, *, end: int = 10**9, env_ids: Any = None) -> None:
    """Return recognisable steps: step t of environment e has obs 10·t + e, action t and next_obs 10·(t + 1) + e."""
    envs = np.arange(2) if env_ids is None else np.array(env_ids)
    for t in range(first, first + count):
        obs = (10.0 * t + envs)[:, None]
        ends = np.full(len(envs), t % end == end - 1)
        flags = np.zeros(len(envs), bool)
        replay.add(obs, np.full(len(envs), float(t)), envs, ends, flags, obs + 10, env_ids=env_ids)


def assert_exact(replay: rl.ReplayBuffer) -> None:
    """Assert that every stored row is a step that `steps` added."""
    replay.check()
    rows = replay[replay.ids()]
    torch.testing.assert_close(rows["obs"][:, 0], 10 * rows["action"] + rows["reward"], rtol=0, atol=0)
    torch.testing.assert_close(rows["next_obs"], rows["obs"] + 10, rtol=0, atol=0)


class TestConnecting:
    def test_what_one_has_written_the_other_samples_and_the_other_way_round(self) -> None:
        replay = shared()
        other = rl.connect(pickle.loads(pickle.dumps(replay.handle())), seed=1)
        steps(replay, 0, 3, env_ids=[0])
        steps(other, 0, 4, env_ids=[1])
        assert len(replay) == len(other) == 7
        assert replay.ids().tolist() == other.ids().tolist()
        assert_exact(replay)
        assert_exact(other)

    def test_a_handle_is_small(self) -> None:
        small, large = (len(pickle.dumps(shared(size).handle())) for size in (12, 1200))
        assert small <= large < 4096

    def test_priorities_and_the_number_of_draws_are_shared(self) -> None:
        replay = shared(sampler=rl.Prioritized(alpha=1.0, beta=0.0, eps=0.0))
        other = rl.connect(replay.handle(), seed=1)
        steps(replay, 0, 4)
        ids = replay.ids()
        other.update_priority(ids, torch.where(ids == ids[3], 5.0, 0.0))
        assert set(replay.sample(50)["index"].tolist()) == {int(ids[3])}
        # A new row has the largest priority of all processes.
        steps(replay, 4, 1)
        np.testing.assert_allclose(replay.sampler.state()["mass"].sum(), 15.0)
        assert int(other.sampler.state()["draws"]) == 50

    def test_a_buffer_that_was_cleared_by_another_is_empty(self) -> None:
        replay = shared()
        other = rl.connect(replay.handle())
        steps(other, 0, 3)
        replay.clear()
        with pytest.raises(rl.NotReadyError, match="sample: expected at least 1 stored transition, got 0"):
            other.sample(1)

    def test_the_memory_stays_when_its_maker_has_gone(self) -> None:
        replay = shared()
        steps(replay, 0, 3)
        other = rl.connect(replay.handle())
        del replay
        assert_exact(other)
        assert_exact(rl.connect(other.handle()))

    def test_checkpoints_of_shared_memory_load_anywhere(self, tmp_path: Any) -> None:
        replay = shared(sampler=rl.Prioritized())
        steps(replay, 0, 9, end=4)
        replay.save(tmp_path)
        loaded = rl.load(tmp_path, rl.ReplayBuffer, device=rl.Memory.shared())
        other = rl.connect(loaded.handle())
        assert other.ids().tolist() == replay.ids().tolist()
        assert_exact(other)

    def test_files_are_closed_with_the_last_use(self) -> None:
        def files() -> int:
            return len(os.listdir("/proc/self/fd"))

        before = files()
        replay = shared(sampler=rl.Prioritized())
        other = rl.connect(replay.handle())
        assert files() > before
        del replay, other
        assert files() == before


class TestCopyingBesideWriters:
    """Rows are copied without the lock; rows overwritten meanwhile are not returned."""

    @pytest.mark.parametrize("sampler", [rl.Uniform(), rl.Prioritized()], ids=["uniform", "prioritized"])
    @pytest.mark.parametrize("obs", [1, rl.Stacked(1, 3, 0)], ids=["plain", "stacked"])
    def test_a_batch_with_an_overwritten_row_is_drawn_again(
        self, sampler: Any, obs: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        replay = shared(obs=obs, sampler=sampler)
        other = rl.connect(replay.handle(), seed=1)

        def write(first: int, count: int) -> None:
            for t in range(first, first + count):
                now, then = (np.array([max(s, 0) for s in (u - 2, u - 1, u)], np.float32) for u in (t, t + 1))
                now, then = (np.stack([x[:, None]] * 2) if obs != 1 else np.stack([x[-1:]] * 2) for x in (now, then))
                flags = np.zeros(2, bool)
                other.add(now, np.full(2, float(t)), np.arange(2), flags, flags, then)

        write(0, 6)
        copied, read = [], NativeReader._read_without_lock

        def overwritten(self: Any, reserved: Any, slots: torch.Tensor) -> Any:
            leaves = read(self, reserved, slots)
            copied.append(leaves[("action",)].tolist())
            # Half of the ring is overwritten while the batch is copied.
            write(6, 3)
            return leaves

        monkeypatch.setattr(NativeReader, "_read_without_lock", overwritten)
        batch = replay.sample(32)
        assert min(copied[0]) < 3, "a row that is gone now"
        assert len(copied) == 1
        assert int(batch["action"].min()) >= 3
        newest = batch["obs"].flatten(1)[:, -1]
        assert torch.equal(newest, batch["action"])
        assert torch.equal(batch["index"], 2 * batch["action"].long() + batch["reward"].long())

    def test_nobody_has_the_lock_while_rows_are_copied(self, monkeypatch: pytest.MonkeyPatch) -> None:
        replay = shared()
        steps(replay, 0, 4)
        free: list[bool] = []

        def watch(name: str) -> None:
            original = getattr(NativeReader, name)

            def watched(*arguments: Any) -> Any:
                free.append(can_be_taken(replay._lock))
                return original(*arguments)

            monkeypatch.setattr(NativeReader, name, watched)

        watch("read")
        watch("_read_without_lock")
        replay.sample(8)
        replay.sample(8, rl.NStep(1, 0.9))
        replay.sample(8, out=replay.sample(8))
        assert free == [True, True, False]

    def test_a_batch_is_the_one_of_a_buffer_that_nobody_shares(self) -> None:
        for sampler in (rl.Uniform(), rl.Prioritized()):
            replay, alone = shared(sampler=sampler), rl.ReplayBuffer(12, 1, (), num_envs=2, seed=0, sampler=sampler)
            steps(replay, 0, 9, end=4)
            steps(alone, 0, 9, end=4)
            for _ in range(3):
                assert (replay.sample(16) == alone.sample(16)).all()


class TestWaiting:
    @pytest.mark.parametrize("seconds", [-1.0, 0.0, 0.1])
    def test_a_wait_that_timed_out_leaves_the_lock_usable(self, seconds: float) -> None:
        lock: Any = shared()._lock
        with held_by_another_thread(lock), lock.within(seconds) as is_ours:
            assert not is_ours
        assert can_be_taken(lock)

    @pytest.mark.parametrize("seconds", [1e10, 1e300, float("inf")])
    def test_one_can_wait_for_longer_than_nanoseconds_count(self, seconds: float) -> None:
        lock: Any = shared()._lock
        with held_by_another_thread(lock, 0.1), lock.within(seconds) as is_ours:
            assert is_ours
        assert can_be_taken(lock)

    def test_ctrl_c_while_one_waits_leaves_the_lock_free(self) -> None:
        # Background jobs of a shell ignore SIGINT.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        lock: Any = shared()._lock
        interrupted = 0
        for _ in range(5):
            with held_by_another_thread(lock, 0.03):
                try:
                    threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
                    with lock.within(10.0):
                        time.sleep(0.5)
                except KeyboardInterrupt:
                    interrupted += 1
            assert can_be_taken(lock)
        assert interrupted == 5

    @pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
    def test_a_forked_child_is_told_so_too(self) -> None:
        replay: Any = shared()
        child = os.fork()
        if child == 0:
            try:
                with replay._lock.within(1.0):
                    os._exit(1)
            except RuntimeError as error:
                os._exit(7 if "forked child" in str(error) else 2)
            except BaseException:
                os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@contextmanager
def held_by_another_thread(lock: Any, seconds: float = 60.0) -> Iterator[None]:
    """Hold the lock in another thread for some seconds, or until the `with` block ends."""
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            done.wait(seconds)

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait()
    try:
        yield
    finally:
        done.set()
        holder.join()


def can_be_taken(lock: Any) -> bool:
    """Return whether another thread can take the lock."""

    def take_lock() -> bool:
        with lock.within(0.0) as is_ours:
            return is_ours

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(take_lock).result()


class TestRefusals:
    def test_memory_of_one_process_has_no_handle(self) -> None:
        replay = rl.ReplayBuffer(4, 1, ())
        with pytest.raises(
            rl.SchemaError, match=r"handle: expected a buffer in shared memory, got a buffer on cpu\. Make"
        ):
            replay.handle()

    def test_a_process_that_has_gone_is_named(self) -> None:
        handle = shared().handle()
        gone = Handle(SharedAddress(handle.address.token, 2**22 + 1, handle.address.files), handle.settings)
        with pytest.raises(
            ConnectionError, match=r"connect: expected a process that still has the buffer, got no such memory in pr"
        ):
            rl.connect(gone)

    def test_a_number_that_another_file_has_by_now_is_not_believed(self) -> None:
        first, second = shared(), shared()
        mixed = SharedAddress(first.handle().address.token, os.getpid(), second.handle().address.files)
        with pytest.raises(ConnectionError, match="connect: expected the shared memory relive-.*, got another file"):
            rl.connect(Handle(mixed, first.handle().settings))

    @pytest.mark.parametrize(
        "settings",
        [
            {"capacity": 6},
            {"capacity": 24},
            {"obs": rl.Field((1,), torch.int32)},
            {"num_envs": None},
            {"num_envs": 3},
            {"extra": {"more": 1}},
            {"sampler": rl.Prioritized()},
            {"sampler": rl.Counted()},
            {"next_obs": "stored"},
            {"autoreset": "NEXT_STEP"},
        ],
        ids=str,
    )
    def test_other_settings_do_not_connect(self, settings: dict[str, Any]) -> None:
        replay = shared()
        handle = replay.handle()
        with pytest.raises(rl.SchemaError, match="connect: expected the settings of the shared buffer, got others"):
            rl.connect(Handle(handle.address, {**handle.settings, **settings}))

    def test_a_sampler_with_other_numbers_does_not_connect_and_one_with_a_function_does(self) -> None:
        replay = shared(sampler=rl.Counted(rl.Prioritized(beta=lambda drawn: 0.5)))
        settings = replay.handle().settings
        alike = {**settings, "sampler": rl.Counted(rl.Prioritized(beta=lambda drawn: 0.5))}
        rl.connect(Handle(replay.handle().address, alike)).check()
        with pytest.raises(rl.SchemaError, match="settings"):
            rl.connect(Handle(replay.handle().address, {**settings, "sampler": rl.Counted(rl.Prioritized(alpha=1.0))}))

    FORGED: ClassVar[dict[str, dict[str, Any]]] = {
        "no settings": {"settings": {}},
        "settings that are none": {"settings": 7},
        "no address": {"address": "here"},
        "a process that is no number": {"process": "self"},
        "no process": {"process": None},
        "no files": {"files": {}},
        "files that are none": {"files": None},
        "paths for files": {"files": defaultdict(lambda: "../../1")},
        "negative files": {"files": defaultdict(lambda: -1)},
        "another token": {"token": "x" * 9999},
        "a token that is no name": {"token": 7},
    }

    @pytest.mark.thorough
    @pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
    def test_forged_handles_are_refused_in_words(self, forged: dict[str, Any]) -> None:
        replay = shared()
        handle: Any = replay.handle()
        parts = {name: forged.get(name, getattr(handle.address, name)) for name in ("token", "process", "files")}
        # The buffers of earlier tests must be freed.
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises((rl.SchemaError, ConnectionError), match="connect: expected"):
            rl.connect(Handle(forged.get("address", SharedAddress(**parts)), forged.get("settings", handle.settings)))
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == before

    def test_nobody_can_shorten_shared_memory(self) -> None:
        """Reading beyond the end of a mapped file would kill the process."""
        replay = shared()
        for file in replay.handle().address.files.values():
            for length in (0, 1 << 20):
                with pytest.raises(PermissionError):
                    os.ftruncate(file, length)

    def test_memory_that_could_be_shortened_does_not_connect(self) -> None:
        replay = shared()
        handle = replay.handle()
        name, old = next((name, file) for name, file in handle.address.files.items() if name != "settings")
        file = os.memfd_create(f"{handle.address.token}-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, os.fstat(old).st_size)
            forged = SharedAddress(handle.address.token, os.getpid(), {**handle.address.files, name: file})
            with pytest.raises(ConnectionError, match=r"expected \d+ sealed bytes, got a file that can be shortened"):
                rl.connect(Handle(forged, handle.settings))
        finally:
            os.close(file)

    def test_anything_but_a_handle_is_refused(self) -> None:
        with pytest.raises(rl.SchemaError, match=r"connect: expected a handle, got 'replay'"):
            rl.connect("replay")  # pyright: ignore[reportArgumentType]

    @pytest.mark.parametrize(
        "make", [lambda m: rl.RolloutBuffer(4, 2, 1, (), device=m), lambda m: rl.DistillationBuffer(4, 1, device=m)]
    )
    def test_only_replay_buffers_are_shared(self, make: Any) -> None:
        with pytest.raises(
            rl.SchemaError, match=r"device: expected a torch device for a .*Buffer, got Memory\.shared\(\)"
        ):
            make(rl.Memory.shared())

    def test_without_the_native_core_there_is_no_shared_memory(self) -> None:
        with rl.kernels.force_torch(), pytest.raises(rl.SchemaError, match="Memory.shared: expected Linux and relive"):
            shared()


def arrays(replay: rl.ReplayBuffer) -> list[torch.Tensor]:
    ring = replay.storage.rows.ring
    assert ring.journal is not None
    return [*replay.storage.rows.tensors, ring.journal]


LAYOUTS = {
    "shared": {},
    "stored": {"next_obs": "stored"},
    "dummy steps": {"autoreset": "NEXT_STEP"},
    "prioritized": {"sampler": rl.Prioritized()},
}


@pytest.mark.parametrize("layout", select("prioritized", of=LAYOUTS))
@pytest.mark.parametrize("end", [3, 1000])
@pytest.mark.filterwarnings("ignore::relive.DataWarning")
def test_whatever_of_a_step_was_written_when_its_process_died_the_rest_is_exact(layout: str, end: int) -> None:
    """A step is interrupted after any subset of its changed bytes was written."""
    random = np.random.default_rng(0)
    for trial in range(60):
        replay = shared(**LAYOUTS[layout])
        count = int(random.integers(1, 20))
        steps(replay, 0, count, end=end)
        before = [tensor.clone() for tensor in arrays(replay)]
        ids = set(replay.ids().tolist())
        torn = [0, 1] if trial % 2 else [1]
        steps(replay, count + trial % 3 // 2, 1, end=end, env_ids=torn)
        for old, new in zip(before, arrays(replay), strict=True):
            bytes_old, bytes_new = (tensor.view(-1).view(torch.uint8).numpy() for tensor in (old, new))
            kept = random.random(len(bytes_new)) < random.choice([0.0, 0.5, 1.0])
            # Numbers of up to eight bytes are written at once.
            kept = kept.reshape(-1, old.element_size())[:, :1].repeat(old.element_size(), 1).reshape(-1)
            bytes_new[~kept] = bytes_old[~kept]
        ring = replay.storage.rows.ring
        assert ring.journal is not None
        ring.journal[torn] = 1 + 2 * before[-6][torn] + before[-5][torn].long()
        replay._recover()
        assert_exact(replay)
        lost = ids - set(replay.ids().tolist())
        assert all(row % 2 in torn for row in lost), "the step of one environment undid another's"
        assert len(lost) <= 5 * len(torn)
        replay.sample(32)
        steps(replay, count + 2, 8, end=end)
        assert_exact(replay)


def test_frames_of_rows_that_were_lost_are_not_stacked() -> None:
    random = np.random.default_rng(0)
    field = rl.Stacked(rl.Field(1), 3)
    for trial in range(40):
        replay = shared(24, obs=field, num_envs=1)
        count = int(random.integers(1, 30))
        frames = [0.0] * 3

        def add(t: int, replay: rl.ReplayBuffer = replay, frames: list[float] = frames) -> None:
            now, then = np.array([frames[-3:]])[:, None], np.array([[*frames[-2:], t + 1.0]])[:, None]
            frames.append(t + 1.0)
            replay.add(now, [float(t)], [0.0], [False], [False], then)

        for t in range(count):
            add(t)
        ring = replay.storage.rows.ring
        journal = 1 + 2 * int(ring.head[0]) + int(ring.open[0])
        add(count)
        assert ring.journal is not None
        ring.journal[0] = journal
        replay._recover()
        replay.check()
        rows = replay[replay.ids()]
        expected = torch.stack([rows["action"] - 2, rows["action"] - 1, rows["action"]], 1).clamp(min=0)
        torch.testing.assert_close(rows["obs"][:, 0], expected, rtol=0, atol=0)
        assert len(rows) >= min(count, 24) - 7, trial


def test_a_clear_that_was_stopped_half_way_leaves_whole_rows() -> None:
    replay = shared(40)
    steps(replay, 0, 15, end=4)
    kind = replay.storage.rows.ring.kind
    kind[:9] = 0
    replay._recover()
    assert_exact(replay)
    assert len(replay) > 0
    kind.zero_()
    replay._recover()
    assert_exact(replay)
    assert len(replay) == 0


def test_without_a_journal_a_half_written_step_would_be_served() -> None:
    replay = shared()
    steps(replay, 0, 9)
    head, column = replay.storage.rows.ring.head.clone(), replay.storage.rows.leaves[0]
    steps(replay, 9, 1)
    column[:, :] = torch.where(column == 90.0, 17.0, column)
    replay._recover()
    with pytest.raises(AssertionError):
        assert_exact(replay)
    assert (replay.storage.rows.ring.head > head).all()
