"""Check and time relive on a GPU: `python -m relive.gpu_report` writes a Markdown page and a JSON file.

It should take under ten minutes on a small GPU; nobody has run it on one yet. Nothing is sent: please attach both files
to an issue. Without a GPU, `--device interpreter` runs the supported sections at small sizes in Triton's interpreter.
"""
# A section is a function that yields the rows of its table. Sections compare a device with the host bit for bit, or
# measure host and device time.

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial, wraps
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

import relive as rl
from relive import kernels

MAX_SECONDS = 540.0
"""Time after which no further section starts."""
OBS, ACTION = 48, 12
Row = dict[str, Any]
"""One row of a table."""


class UnsupportedSection(Exception):
    """Raised by a section that needs hardware which is missing."""


@dataclass(frozen=True)
class SectionSizes:
    """Numbers of environments, rows and repetitions of all sections."""

    envs: tuple[int, ...] = (3, 8, 4096, 65_536)
    steps: int = 12
    batch: int = 4096
    large_batch: int = 32_768
    tree_rows: int = 4_000_000
    rounds: int = 40
    image_envs: int = 64

    @property
    def many_envs(self) -> int:
        """Largest number of environments up to 4096."""
        return max(count for count in self.envs if count <= 4096)


SMALL = SectionSizes((3, 8), 7, 16, 40, 5000, 2, 2)
"""SectionSizes for Triton's interpreter."""


@dataclass
class CheckedDevice:
    """The device to check: a GPU, or the CPU with Triton's interpreter."""

    device: torch.device
    sizes: SectionSizes
    fasttd3: str | None = None
    copy_speed: float = 0.0
    """Copy bandwidth of the device in bytes per second; 0 if unknown."""

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def require_gpu(self) -> None:
        if not self.is_gpu:
            raise UnsupportedSection("needs a GPU")

    @contextmanager
    def use_triton(self) -> Iterator[None]:
        """Use Triton's kernels inside, as on a GPU."""
        if self.is_gpu:
            yield
        else:
            with kernels.force("triton"):
                yield

    def synchronise(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def make_replay(self, envs: int, rows: int, *, device: Any = None, **options: Any) -> rl.ReplayBuffer:
        """Make a buffer with `rows` rows per environment."""
        device = self.device if device is None else device
        return rl.ReplayBuffer(rows * envs, OBS, ACTION, num_envs=envs, device=device, seed=0, **options)


def generate_steps(envs: int, steps: int, seed: int = 0) -> Iterator[dict[str, torch.Tensor]]:
    """Yield random steps: one in five ends an episode, and one in ten is followed by an unannounced reset."""
    random = torch.Generator().manual_seed(seed)
    current_obs = torch.rand(envs, OBS, generator=random)
    for _ in range(steps):
        following = torch.rand(envs, OBS, generator=random)
        ended = torch.rand(envs, generator=random) < 0.2
        truncated = ended & (torch.rand(envs, generator=random) < 0.5)
        yield {
            "obs": current_obs, "action": torch.rand(envs, ACTION, generator=random),
            "reward": torch.rand(envs, generator=random), "terminated": ended & ~truncated, "truncated": truncated,
            "next_obs": following,
        }  # fmt: skip
        resets = ended | (torch.rand(envs, generator=random) < 0.1)
        current_obs = torch.where(resets.view(-1, 1), torch.rand(envs, OBS, generator=random), following)


def make_constant_step(envs: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return a step that can be added repeatedly: its next observation equals its observation."""
    (step,) = generate_steps(envs, 1)
    step["next_obs"] = step["obs"].clone()
    flags = {name: torch.zeros(envs, dtype=torch.bool) for name in ("terminated", "truncated")}
    return {name: value.to(device) for name, value in (step | flags).items()}


def fill_rollout(rollout: rl.RolloutBuffer, step: dict[str, torch.Tensor]) -> None:
    """Fill a rollout by adding one step repeatedly."""
    rollout.clear()
    rest = {name: value for name, value in step.items() if name != "next_obs"}
    for _ in range(rollout.num_steps):
        rollout.add(**rest, value=step["reward"], log_prob=step["reward"])


def measure_seconds(call: Callable[[], object], target: CheckedDevice) -> float:
    """Return the seconds that a call takes, including the work of the device."""
    target.synchronise()
    start = perf_counter()
    call()
    target.synchronise()
    return perf_counter() - start


def describe_machine(target: CheckedDevice) -> Iterator[Row]:
    """List the versions, the driver and the device."""
    with target.use_triton():
        backend_name = kernels.choose_backend([torch.zeros(1, device=target.device)])
    triton = sys.modules.get("triton")
    facts = {
        "relive": rl.__version__, "torch": torch.__version__, "CUDA or ROCm": torch.version.cuda or torch.version.hip,
        "Triton": getattr(triton, "__version__", None), "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}", "driver": _find_driver(), "kernels": backend_name,
    }  # fmt: skip
    if target.is_gpu:
        properties = torch.cuda.get_device_properties(target.device)
        facts |= {
            "GPU": properties.name, "GPUs": torch.cuda.device_count(), "processors": properties.multi_processor_count,
            "memory": f"{properties.total_memory >> 20:,} MiB", "capability": f"{properties.major}.{properties.minor}",
            "architecture": getattr(properties, "gcnArchName", None),
        }  # fmt: skip
    yield from ({"what": name, "value": value} for name, value in facts.items() if value is not None)


def _find_driver() -> str | None:
    commands = (
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        ["rocm-smi", "--showdriverversion"],
    )
    for command in commands:
        if shutil.which(command[0]) is not None:
            words = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20).stdout.split()
            return words[-1] if words else None
    return None


VIEWS: dict[str, Any] = {
    "transitions": None, "3 steps": rl.NStep(3, 0.99), "sequences": rl.Sequence(6),
    "across episodes": rl.Sequence(6, 3, True),
}  # fmt: skip


def find_differences(a: Any, b: Any) -> list[str]:
    """Return the names of the fields in which two batches differ in any bit."""
    a, b = a.cpu(), b.cpu()
    paths = set(a.keys(True, True)) | set(b.keys(True, True))
    return sorted(
        str(path) for path in paths if not torch.equal(a.get(path, torch.empty(0)), b.get(path, torch.ones(1)))
    )


def require(condition: object, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _fill_both_buffers(
    target: CheckedDevice, envs: int, rows: int, on_step: Callable[[Any, Any], None] | None = None, **options: Any
) -> tuple[rl.ReplayBuffer, rl.ReplayBuffer]:
    """Fill a host buffer and a device buffer with the same steps; call `on_step(host, device)` after each step."""
    host = target.make_replay(envs, rows, device="cpu", **options)
    with target.use_triton():
        device_buffer = target.make_replay(envs, rows, **options)
    for step in generate_steps(envs, target.sizes.steps, seed=envs):
        host.add(**step)
        with target.use_triton():
            device_buffer.add(**{name: value.to(target.device) for name, value in step.items()})
        if on_step is not None:
            on_step(host, device_buffer)
    return host, device_buffer


def compare_rows(target: CheckedDevice) -> Iterator[Row]:
    """Compare a device buffer and a host buffer that stored the same steps."""
    for envs in target.sizes.envs:
        host, device_buffer = _fill_both_buffers(target, envs, target.sizes.steps - 2 if envs < 10_000 else 4)
        with target.use_triton():
            device_buffer.check()
            require(len(host) == len(device_buffer), f"expected {len(host)} rows, got {len(device_buffer)}")
            ids = host.ids()
            require(torch.equal(ids, device_buffer.ids().cpu()), "the ids of the stored rows differ")
            ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))[:20_000]]
            read = {name: device_buffer.read(ids.to(target.device), view) for name, view in VIEWS.items()}
        differing_fields = {name: find_differences(host.read(ids, view), read[name]) for name, view in VIEWS.items()}
        require(not any(differing_fields.values()), f"batches differ: {differing_fields}")
        yield {"environments": envs, "rows": len(host), "compared": ", ".join(VIEWS), "result": "equal"}


def compare_priorities(target: CheckedDevice) -> Iterator[Row]:
    """Compare priorities on the device and on the host after the same updates, and draw by priority."""

    def update(host: rl.ReplayBuffer, device_buffer: rl.ReplayBuffer) -> None:
        ids = host.ids()[::3]
        errors = torch.rand(len(ids), generator=torch.Generator().manual_seed(len(ids)))
        expected = host.update_priority(ids, errors)
        with target.use_triton():
            stale = int(device_buffer.update_priority(ids.to(target.device), errors.to(target.device)))
        require(stale == expected, f"expected {expected} stale ids, got {stale}")

    for envs in target.sizes.envs[:3]:
        host, on_device = _fill_both_buffers(target, envs, target.sizes.steps - 2, update, sampler=rl.Prioritized())
        masses = [buffer.sampler.state()["mass"].cpu() for buffer in (host, on_device)]
        largest_difference = float(((masses[0] - masses[1]).abs() / masses[0].clamp(min=1e-300)).max())
        require(largest_difference < 1e-12, f"masses differ by up to {largest_difference:.1e} of them")
        with target.use_triton():
            on_device.check()
            index = on_device.sample(target.sizes.batch)["index"].cpu()
        require(set(index.tolist()) <= set(host.ids().tolist()), "a row was drawn that is not stored")
        yield {
            "environments": envs,
            "rows": len(host),
            "largest difference of masses": f"{largest_difference:.1e}",
            "result": "equal",
        }


def compute_philox(counter: list[int], key: int) -> list[int]:
    """Return the four words of Philox 4×32 with ten rounds.

    Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011).
    """
    c, k = list(counter), [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def check_draws(target: CheckedDevice) -> Iterator[Row]:
    """Compare random numbers with the reference algorithm, and test that draws are uniform."""
    from relive.kernels.triton.stream import DeviceStream  # noqa: PLC0415 (needs Triton)

    with target.use_triton():
        stream = DeviceStream(11, target.device)
        both_draws = [stream.uniform(40, target.device).tolist() for _ in range(2)]
        key = int(stream.numbers[0])
    for call, numbers in enumerate(both_draws):
        words = [compute_philox([i, call, 0, 0], key) for i in range(40)]
        require(numbers == [(((a << 31) ^ b) >> 10) * 2.0**-53 for a, b, _, _ in words], "numbers are not Philox's")
    yield {"what": "numbers of Philox", "result": "equal"}
    with target.use_triton():
        replay = target.make_replay(3, 20)
        for step in generate_steps(3, 25):
            replay.add(**{name: value.to(target.device) for name, value in step.items()})
        batches = [replay.sample(1000)["index"].cpu() for _ in range(20)]
    counts = torch.cat(batches).unique(return_counts=True)[1].double()
    expected = 20_000 / len(replay)
    chi_squared = float(((counts - expected) ** 2 / expected).sum()) + expected * (len(replay) - len(counts))
    deviation = (chi_squared - len(replay) + 1) / math.sqrt(2 * len(replay) - 2)
    require(abs(deviation) < 6, f"χ² of draws is {deviation:.1f} standard deviations off")
    yield {"what": "uniform draws", "result": f"χ² {deviation:+.1f} standard deviations from its mean"}


class _Learner:
    """A buffer, the tensors of its steps at fixed addresses, and a round of a training loop."""

    def __init__(self, target: CheckedDevice, device: torch.device | None = None) -> None:
        self.replay = target.make_replay(8, 6, sampler=rl.Prioritized(), device=device)
        self.step = make_constant_step(8, self.replay.device)
        self.replay.add(**self.step)
        self.out = self.replay.sample(16)
        self.run_round()

    def set_step(self, step: dict[str, torch.Tensor]) -> None:
        for name, value in step.items():
            self.step[name].copy_(value)

    def run_round(self) -> None:
        self.replay.add(**self.step)
        self.replay.sample(16, out=self.out)
        self.replay.update_priority(self.out["index"], self.out["reward"])

    def require_equal(self, other: _Learner, situation: str) -> None:
        """Raise unless the rows, the priorities and the last batch of both learners are equal."""
        is_equal = all(
            torch.equal(a.cpu(), b.cpu()) for a, b in zip(self._list_tensors(), other._list_tensors(), strict=True)
        )
        require(is_equal, f"the buffers differ {situation}")
        self.replay.check()

    def _list_tensors(self) -> list[Any]:
        rows = self.replay.storage.rows.tensors
        return [*rows, self.replay.sampler.state()["mass"], *self.out.values(True, True)]


def _run_on_stream(stream: Any, device: torch.device, call: Callable[[], object]) -> None:
    """Run a call on another stream, and synchronise with the current stream before and after."""
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream(device).wait_stream(stream)


def check_cuda_graphs(target: CheckedDevice) -> Iterator[Row]:
    """Compare replays of a captured round with eager rounds: after clear, between eager calls, on another stream."""
    target.require_gpu()
    captured_learner, eager_learner = _Learner(target), _Learner(target)
    # A CUDA graph can capture calls only after they have run once.
    for learner in (captured_learner, eager_learner):
        learner.run_round()
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.Stream(target.device)
    with torch.cuda.graph(graph):
        captured_learner.run_round()
    for number, step in enumerate(generate_steps(8, 9, seed=1)):
        for learner in (captured_learner, eager_learner):
            learner.set_step(step)
            if number == 4:
                learner.replay.clear()
            if number in (2, 6):
                learner.replay.add(**learner.step)
        if number == 7:
            _run_on_stream(other, target.device, graph.replay)
        else:
            graph.replay()
        eager_learner.run_round()
        captured_learner.require_equal(eager_learner, f"after replay {number}")
    yield {"what": "add, sample(out=) and update_priority, 9 replays", "result": "equal"}


def check_streams(target: CheckedDevice) -> Iterator[Row]:
    """Compare the same rounds on the current stream and on another stream."""
    target.require_gpu()
    first, second = _Learner(target), _Learner(target)
    side_stream = torch.cuda.Stream(target.device)
    for step in generate_steps(8, 20, seed=2):
        for learner in (first, second):
            learner.set_step(step)
        first.run_round()
        _run_on_stream(side_stream, target.device, second.run_round)
    first.require_equal(second, "on another stream")
    yield {"what": "20 rounds on two streams", "result": "equal"}


def check_devices(target: CheckedDevice) -> Iterator[Row]:
    """Compare a buffer on the first device with a buffer on the second one, while the first device is current."""
    target.require_gpu()
    if torch.cuda.device_count() < 2:
        raise UnsupportedSection("needs two GPUs")
    first_learner, second_learner = _Learner(target, torch.device("cuda:0")), _Learner(target, torch.device("cuda:1"))
    for step in generate_steps(8, 12, seed=3):
        for learner in (first_learner, second_learner):
            learner.set_step(step)
            learner.run_round()
    first_learner.require_equal(second_learner, "on the second device")
    yield {"what": "12 rounds on cuda:0 and cuda:1", "result": "equal"}


def make_training_calls(target: CheckedDevice) -> dict[str, Callable[[], object]]:
    """Return calls of a training loop that must not synchronise."""
    uniform, prioritized = target.make_replay(8, 30), target.make_replay(8, 30, sampler=rl.Prioritized())
    step = make_constant_step(8, target.device)
    rollout = rl.RolloutBuffer(4, 8, OBS, ACTION, device=target.device, seed=0)
    for _ in range(9):
        uniform.add(**step)
        prioritized.add(**step)
    index, errors = prioritized.sample(16)["index"], torch.ones(16, device=target.device)
    env_ids = torch.tensor([1, 3], device=target.device)
    two_envs = {name: value[:2].clone() for name, value in step.items()}
    return {
        "add": lambda: uniform.add(**step),
        "add(env_ids=)": lambda: uniform.add(**two_envs, env_ids=env_ids),
        "sample": lambda: uniform.sample(16),
        "3 steps": lambda: uniform.sample(16, rl.NStep(3, 0.99)),
        "sequences": lambda: uniform.sample(16, rl.Sequence(4, 2, True)),
        "prioritized add": lambda: prioritized.add(**step),
        "prioritized sample": lambda: prioritized.sample(16),
        "update_priority": lambda: prioritized.update_priority(index, errors),
        "clear": prioritized.clear,
        "rollout add": lambda: fill_rollout(rollout, step),
    }


def check_synchronisation(target: CheckedDevice) -> Iterator[Row]:
    """Run each call in torch's sync debug mode, in which synchronisation raises."""
    target.require_gpu()
    previous = torch.cuda.get_sync_debug_mode()
    for name, call in make_training_calls(target).items():
        call()
        call()
        result = "does not wait"
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        except RuntimeError as error:
            result = f"WAITS: {str(error).splitlines()[0]}"
        finally:
            torch.cuda.set_sync_debug_mode(previous)
        yield {"call": name, "result": result}


def time_first_calls(target: CheckedDevice) -> Iterator[Row]:
    """Time the first call, which compiles kernels, and the third."""
    with target.use_triton():
        for name, call in make_training_calls(target).items():
            first, _, third = (measure_seconds(call, target) for _ in range(3))
            yield {"call": name, "first call": f"{first:.2f} s", "third call": f"{1e6 * third:,.0f} µs"}


def measure_bandwidth(target: CheckedDevice) -> Iterator[Row]:
    """Measure the copy bandwidth of the device, with which other times are compared."""
    source = torch.zeros(1 << (28 if target.is_gpu else 20), dtype=torch.uint8, device=target.device)
    copy = torch.empty_like(source)
    seconds = min(measure_seconds(lambda: copy.copy_(source), target) for _ in range(20))
    target.copy_speed = 2 * source.nbytes / seconds
    yield {"what": f"copy of {source.nbytes >> 20} MiB", "read and written": f"{target.copy_speed / 1e9:,.0f} GB/s"}


def measure_call(target: CheckedDevice, name: str, call: Callable[[], object], num_bytes: int = 0) -> Row:
    """Measure host and device time of a call that reads and writes at least `num_bytes` bytes."""
    for _ in range(3):
        call()
    rounds, host = target.sizes.rounds, []
    for _ in range(rounds):
        target.synchronise()
        start = perf_counter()
        call()
        host.append(perf_counter() - start)
    row: Row = {"call": name, "host µs": round(1e6 * median(host), 1)}
    if not target.is_gpu:
        return row
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.synchronise()
    # The device is kept busy while the calls are queued, so that its time does not include the host's.
    workload_bytes = torch.empty(1 << 27, dtype=torch.uint8, device=target.device)
    for _ in range(1 + int(2 * rounds * median(host) * target.copy_speed / workload_bytes.nbytes)):
        workload_bytes.fill_(1)
    start.record()
    for _ in range(rounds):
        call()
    end.record()
    target.synchronise()
    device = 1e-3 * start.elapsed_time(end) / rounds
    row["device µs"] = round(1e6 * device, 1)
    if num_bytes and target.copy_speed:
        row["of the copy bandwidth"] = f"{num_bytes / device / target.copy_speed:.0%}"
    return row


Calls = Generator[tuple[str, Callable[[], object], int], None, None]
"""Names, calls, and lower bounds of the bytes that the calls read and write; 0 if unknown."""


def make_timed_section(yield_calls: Callable[[CheckedDevice], Calls]) -> Callable[[CheckedDevice], Iterator[Row]]:
    """Make a section of calls to time."""

    @wraps(yield_calls)
    def section(target: CheckedDevice) -> Iterator[Row]:
        # The generator is closed if a call fails, because a forced backend inside it must not outlive the section.
        with target.use_triton(), closing(yield_calls(target)) as calls:
            for name, call, num_bytes in calls:
                yield measure_call(target, name, call, num_bytes)

    return section


@make_timed_section
def time_replay(target: CheckedDevice) -> Calls:
    """Time calls with many environments, with Triton kernels and with torch ops."""
    sizes, step_bytes = target.sizes, 4 * (2 * OBS + ACTION + 1) + 2
    envs = sizes.many_envs
    step = make_constant_step(envs, target.device)
    for kind in ("", ", torch ops"):
        with kernels.force("torch") if kind else nullcontext():
            replay, prioritized = target.make_replay(envs, 64), target.make_replay(envs, 64, sampler=rl.Prioritized())
            for _ in range(5):
                replay.add(**step)
                prioritized.add(**step)
            yield f"add, {envs} environments{kind}", partial(replay.add, **step), 2 * envs * step_bytes
            yield f"prioritized add{kind}", partial(prioritized.add, **step), 2 * envs * step_bytes
            for count in (sizes.batch, sizes.large_batch):
                num_bytes = 2 * count * step_bytes
                errors = torch.rand(count, device=target.device)
                index = prioritized.sample(count)["index"]
                yield f"sample, {count}{kind}", partial(replay.sample, count), num_bytes
                yield f"3 steps, {count}{kind}", partial(replay.sample, count, rl.NStep(3, 0.99)), num_bytes
                if count == sizes.batch:
                    sample = partial(replay.sample, count, rl.Sequence(16))
                    yield f"sequences of 16, {count}{kind}", sample, 16 * num_bytes
                yield f"prioritized sample, {count}{kind}", partial(prioritized.sample, count), num_bytes
                yield f"update_priority, {count}{kind}", partial(prioritized.update_priority, index, errors), 0


@make_timed_section
def time_images(target: CheckedDevice) -> Calls:
    """Measure `add` and `sample` of four stacked 84 × 84 frames, stored as single frames and as whole stacks."""
    envs = target.sizes.image_envs
    flags = {name: torch.zeros(envs, dtype=torch.bool, device=target.device) for name in ("terminated", "truncated")}
    rest = {"action": torch.zeros(envs, dtype=torch.int64, device=target.device), **flags}
    rest["reward"] = torch.zeros(envs, device=target.device)
    first = torch.zeros(envs, 4, 84, 84, dtype=torch.uint8, device=target.device)
    following = first.clone()
    fields = {
        "stacked": rl.Stacked(rl.Field((84, 84), torch.uint8), 4, axis=0),
        "whole": rl.Field((4, 84, 84), torch.uint8),
    }
    for name, obs in fields.items():
        action = rl.Field((), torch.int64)
        replay = rl.ReplayBuffer(40 * envs, obs, action, num_envs=envs, device=target.device, seed=0)
        add, count = partial(replay.add, obs=first, next_obs=following, **rest), target.sizes.batch // 16
        add()
        yield f"add, {envs} images, {name}", add, 2 * envs * first[0].nbytes
        yield f"sample, {count}, {name}", partial(replay.sample, count), 4 * count * first[0].nbytes


@make_timed_section
def time_priority_trees(target: CheckedDevice) -> Calls:
    """Time a priority tree over millions of rows."""
    from relive.kernels.triton.priority_tree import TritonTree  # noqa: PLC0415 (needs Triton)
    from relive.kernels.triton.stream import DeviceStream  # noqa: PLC0415

    rows = target.sizes.tree_rows
    tree, stream = TritonTree(rows, target.device), DeviceStream(0, target.device)
    tree.leaves_view().fill_(1.0)
    tree.rebuild()
    for count in (256, target.sizes.batch, target.sizes.large_batch):
        leaves = torch.randint(rows, (count,), device=target.device)
        values = torch.rand(count, device=target.device)
        yield f"update of {count} of {rows:,}", partial(tree.set_priorities, leaves, values, 0.6, 1e-6), 0
        yield f"draw of {count} of {rows:,}", partial(tree.draw_weighted, count, stream, 0.4, by_global_min=False), 0
    yield f"rebuild of {rows:,}", tree.rebuild, 24 * rows
    error = tree.max_sum_error()
    require(error <= 1e-9, f"sums of the tree are wrong by {error:.1e}")


@make_timed_section
def time_rollouts(target: CheckedDevice) -> Calls:
    """Time a rollout of 24 steps."""
    envs, device = target.sizes.many_envs, target.device
    rollout, step = rl.RolloutBuffer(24, envs, OBS, ACTION, device=device, seed=0), make_constant_step(envs, device)
    yield f"24 rollout adds, {envs} environments", partial(fill_rollout, rollout, step), 0
    numbers = [torch.zeros(24, envs, device=device) for _ in range(3)]
    flags = [torch.zeros(24, envs, dtype=torch.bool, device=device) for _ in range(2)]
    yield "gae of 24 steps", lambda: rl.gae(*numbers, *flags, gamma=0.99, lam=0.95), 0


def time_other_libraries(target: CheckedDevice) -> Iterator[Row]:
    """Time the buffers of FastTD3 (--fasttd3 PATH/fast_td3_utils.py) and of TorchRL, if available."""
    if target.fasttd3 is not None:
        yield from time_fasttd3(target)
    if find_spec("torchrl") is not None:
        yield from time_torchrl(target)
    if target.fasttd3 is None:
        yield {"call": "FastTD3", "host µs": "no --fasttd3"}


@make_timed_section
def time_fasttd3(target: CheckedDevice) -> Calls:
    """Time the buffer of FastTD3."""
    from tensordict import TensorDict  # noqa: PLC0415 (slow)

    envs = target.sizes.many_envs
    step = make_constant_step(envs, target.device)
    spec = spec_from_file_location("fast_td3_utils", str(target.fasttd3))
    if spec is None or spec.loader is None:
        raise FileNotFoundError(target.fasttd3)
    module: Any = module_from_spec(spec)
    spec.loader.exec_module(module)
    done = torch.zeros(envs, dtype=torch.int64, device=target.device)
    after = {"rewards": step["reward"], "dones": done, "truncations": done, "observations": step["next_obs"]}
    batch = TensorDict({"observations": step["obs"], "actions": step["action"], "next": after}, [envs])
    for n_steps in (1, 3):
        buffer = module.SimpleReplayBuffer(envs, 64, OBS, ACTION, OBS, n_steps=n_steps, device=target.device)
        for _ in range(65):
            buffer.extend(batch)
        if n_steps == 1:
            yield f"FastTD3 extend, {envs} environments", partial(buffer.extend, batch), 0
        rows_per_env = max(target.sizes.batch // envs, 1)
        yield f"FastTD3 sample, {rows_per_env * envs}, {n_steps} steps", partial(buffer.sample, rows_per_env), 0


@make_timed_section
def time_torchrl(target: CheckedDevice) -> Calls:
    """Time the buffer of TorchRL."""
    from tensordict import TensorDict  # noqa: PLC0415 (slow)
    from torchrl.data import (  # noqa: PLC0415 (optional) # pyright: ignore[reportMissingImports]
        LazyTensorStorage,
        TensorDictReplayBuffer,
    )

    envs = target.sizes.many_envs
    step = make_constant_step(envs, target.device)
    after = {"observation": step["next_obs"]}
    after |= {name: step[name].unsqueeze(-1) for name in ("reward", "terminated", "truncated")}
    batch = TensorDict({"observation": step["obs"], "action": step["action"], "next": after}, [envs])
    storage = LazyTensorStorage(64 * envs, device=target.device)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=target.sizes.batch)
    buffer.extend(batch)
    yield f"TorchRL extend, {envs} environments", partial(buffer.extend, batch), 0
    yield f"TorchRL sample, {target.sizes.batch}", buffer.sample, 0


SECTIONS: dict[str, Callable[[CheckedDevice], Iterator[Row]]] = {
    "Machine": describe_machine,
    "First calls": time_first_calls,
    "Rows": compare_rows,
    "Priorities": compare_priorities,
    "Draws": check_draws,
    "Waits": check_synchronisation,
    "CUDA graphs": check_cuda_graphs,
    "Two streams": check_streams,
    "Two devices": check_devices,
    "Bandwidth": measure_bandwidth,
    "Replay": time_replay,
    "Images": time_images,
    "Trees": time_priority_trees,
    "Rollouts": time_rollouts,
    "Others": time_other_libraries,
}
"""Sections of the report by title, in order."""


def run_section(title: str, run: Callable[[CheckedDevice], Iterator[Row]], target: CheckedDevice) -> dict[str, Any]:
    """Run a section and return its rows, result and time. A failed section has the rows before the failure."""
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {"title": title, "about": (run.__doc__ or "").strip(), "rows": rows, "result": "passed"}
    start = perf_counter()
    try:
        rows.extend(run(target))
        if any("WAITS" in str(row.get("result")) for row in rows):
            result["result"] = "FAILED"
    except UnsupportedSection as reason:
        result["result"] = f"left out: {reason}"
    except Exception as error:
        # An error of any class becomes part of the report.
        result |= {"result": "FAILED", "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    result["seconds"] = round(perf_counter() - start, 1)
    return result


def make_markdown_page(report: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    lines = [f"# relive on {report['name']}", "", f"{report['date']}, {report['seconds']:.0f} s.", ""]
    lines += ["| section | result | s |", "|---|---|--:|"]
    lines += [f"| {each['title']} | {each['result']} | {each['seconds']} |" for each in report["sections"]]
    for each in report["sections"]:
        lines += ["", f"## {each['title']}", "", each["about"], ""]
        names = list(dict.fromkeys(name for row in each["rows"] for name in row))
        if names:
            lines += [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
            lines += [f"| {' | '.join(str(row.get(name, '–')) for name in names)} |" for row in each["rows"]]
        if "error" in each:
            lines += ["", f"**{each['error']}**", "", "```", each["traceback"].rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every section. Return 1 if one failed, 2 without a device."""
    parser = argparse.ArgumentParser(prog="python -m relive.gpu_report", description=__doc__)
    parser.add_argument("--device", default="cuda", help='a device such as "cuda:0", or "interpreter"')
    parser.add_argument("--out", type=Path, default=Path("relive-gpu-report"), help="the files, without .md and .json")
    parser.add_argument("--fasttd3", metavar="PATH", help="the file fast_td3_utils.py of a clone of FastTD3")
    options = parser.parse_args(arguments)
    is_interpreted = options.device == "interpreter"
    if is_interpreted:
        # Triton reads this variable when it is imported.
        os.environ["TRITON_INTERPRET"] = "1"
    if not is_interpreted and not torch.cuda.is_available():
        _print(f"gpu_report: expected a GPU that torch {torch.__version__} sees, got none. Pass --device interpreter.")
        return 2
    start = perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        # The cache folder is empty, so the first call of each kernel compiles the kernel.
        os.environ["TRITON_CACHE_DIR"] = cache
        target = CheckedDevice(
            torch.device("cpu" if is_interpreted else options.device), SMALL if is_interpreted else SectionSizes()
        )
        target.fasttd3 = options.fasttd3
        sections = []
        for title, run in SECTIONS.items():
            if perf_counter() - start > MAX_SECONDS:
                sections.append(
                    {"title": title, "about": "", "rows": [], "result": "left out: no time", "seconds": 0.0}
                )
                continue
            sections.append(run_section(title, run, target))
            _print(f"{title}: {sections[-1]['result']} ({sections[-1]['seconds']} s)")
    name = "Triton's interpreter" if is_interpreted else torch.cuda.get_device_name(target.device)
    report = {"name": name, "date": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC", "sections": sections}
    report["seconds"] = perf_counter() - start
    options.out.with_suffix(".md").write_text(make_markdown_page(report), encoding="utf-8")
    options.out.with_suffix(".json").write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")
    _print(f"Written to {options.out}.md and {options.out}.json. Please send both with an issue, good or bad.")
    return int(any(each["result"] == "FAILED" for each in sections))


if __name__ == "__main__":
    raise SystemExit(main())
