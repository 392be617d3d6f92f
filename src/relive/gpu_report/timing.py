"""Sections that measure host and device time, other libraries, and the fraction of the copy bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from statistics import median
from time import perf_counter
from typing import Any

import torch

import relive as rl
from relive import kernels
from relive.gpu_report.place import ACTION, OBS, Place, Row, constant_step, fill, seconds_of

Call = Callable[[], object]


def bandwidth(place: Place) -> Iterator[Row]:
    """Copy bandwidth of the device, the reference for other times."""
    source = torch.zeros(1 << (28 if place.is_gpu else 20), dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    seconds = min(seconds_of(lambda: target.copy_(source), place) for _ in range(20))
    place.copy_speed = 2 * source.nbytes / seconds
    yield {"what": f"copy of {source.nbytes >> 20} MiB", "read and written": f"{place.copy_speed / 1e9:,.0f} GB/s"}


def measure_time(place: Place, name: str, call: Call, num_bytes: int = 0) -> Row:
    """Measure host and device time of a call. `num_bytes`: the minimum number of bytes it reads and writes."""
    for _ in range(3):
        call()
    rounds, host = place.sizes.rounds, []
    for _ in range(rounds):
        place.wait()
        start = perf_counter()
        call()
        host.append(perf_counter() - start)
    row: Row = {"call": name, "host µs": round(1e6 * median(host), 1)}
    if not place.is_gpu:
        return row
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    place.wait()
    # Keep the device busy while the calls are queued, to measure its time without the host's.
    busy = torch.empty(1 << 27, dtype=torch.uint8, device=place.device)
    for _ in range(1 + int(2 * rounds * median(host) * place.copy_speed / busy.nbytes)):
        busy.fill_(1)
    start.record()
    for _ in range(rounds):
        call()
    end.record()
    place.wait()
    device = 1e-3 * start.elapsed_time(end) / rounds
    row["device µs"] = round(1e6 * device, 1)
    if num_bytes and place.copy_speed:
        row["of the copy bandwidth"] = f"{num_bytes / device / place.copy_speed:.0%}"
    return row


def replay_calls(place: Place) -> Iterator[Row]:
    """Calls with many environments, with Triton kernels and with torch ops."""
    sizes, step_bytes = place.sizes, 4 * (2 * OBS + ACTION + 1) + 2
    envs = sizes.many_envs
    step = constant_step(envs, place.device)
    for kind in ("", ", torch ops"):
        with kernels.force("torch") if kind else place.kernels():
            replay, prioritized = place.replay(envs, 64), place.replay(envs, 64, sampler=rl.Prioritized())
            for _ in range(5):
                replay.add(**step)
                prioritized.add(**step)
            yield measure_time(
                place, f"add, {envs} environments{kind}", partial(replay.add, **step), 2 * envs * step_bytes
            )
            yield measure_time(place, f"prioritized add{kind}", partial(prioritized.add, **step), 2 * envs * step_bytes)
            for count in (sizes.batch, sizes.large_batch):
                num_bytes = 2 * count * step_bytes
                errors = torch.rand(count, device=place.device)
                index = prioritized.sample(count)["index"]
                reads: dict[str, Any] = {"sample": None, "3 steps": rl.NStep(3, 0.99)}
                if count == sizes.batch:
                    reads["sequences of 16"] = rl.Sequence(16)
                for name, view in reads.items():
                    length = 16 if name.startswith("seq") else 1
                    yield measure_time(
                        place, f"{name}, {count}{kind}", partial(replay.sample, count, view), length * num_bytes
                    )
                yield measure_time(
                    place, f"prioritized sample, {count}{kind}", partial(prioritized.sample, count), num_bytes
                )
                update = partial(prioritized.update_priority, index, errors)
                yield measure_time(place, f"update_priority, {count}{kind}", update)


def images(place: Place) -> Iterator[Row]:
    """Stacks of four 84 × 84 frames, stored as single frames and whole."""
    envs = place.sizes.image_envs
    flags = {name: torch.zeros(envs, dtype=torch.bool, device=place.device) for name in ("terminated", "truncated")}
    rest = {"action": torch.zeros(envs, dtype=torch.int64, device=place.device), **flags}
    rest["reward"] = torch.zeros(envs, device=place.device)
    first = torch.zeros(envs, 4, 84, 84, dtype=torch.uint8, device=place.device)
    following = first.clone()
    fields = {
        "stacked": rl.Stacked(rl.Field((84, 84), torch.uint8), 4, axis=0),
        "whole": rl.Field((4, 84, 84), torch.uint8),
    }
    for name, obs in fields.items():
        with place.kernels():
            action = rl.Field((), torch.int64)
            replay = rl.ReplayBuffer(40 * envs, obs, action, num_envs=envs, device=place.device, seed=0)
            add, count = partial(replay.add, obs=first, next_obs=following, **rest), place.sizes.batch // 16
            add()
            yield measure_time(place, f"add, {envs} images, {name}", add, 2 * envs * first[0].nbytes)
            sample = partial(replay.sample, count)
            yield measure_time(place, f"sample, {count}, {name}", sample, 4 * count * first[0].nbytes)


def trees(place: Place) -> Iterator[Row]:
    """A priority tree over millions of rows."""
    from relive.kernels.triton.priority_tree import TritonTree  # noqa: PLC0415 (which needs Triton)
    from relive.kernels.triton.stream import DeviceStream  # noqa: PLC0415

    rows = place.sizes.tree_rows
    with place.kernels():
        tree, stream = TritonTree(rows, place.device), DeviceStream(0, place.device)
        tree.leaves_view().fill_(1.0)
        tree.rebuild()
        for count in (256, place.sizes.batch, place.sizes.large_batch):
            leaves = torch.randint(rows, (count,), device=place.device)
            values = torch.rand(count, device=place.device)
            update = partial(tree.accept, leaves, values, 0.6, 1e-6)
            yield measure_time(place, f"update of {count} of {rows:,}", update)
            draw = partial(tree.draw_weighted, count, stream, 0.4, by_smallest=False)
            yield measure_time(place, f"draw of {count} of {rows:,}", draw)
        yield measure_time(place, f"rebuild of {rows:,}", tree.rebuild, 24 * rows)
        error = tree.check()
        if error > 1e-9:
            raise AssertionError(f"sums of the tree are wrong by {error:.1e}")


def rollouts(place: Place) -> Iterator[Row]:
    """A rollout of 24 steps."""
    envs, device = place.sizes.many_envs, place.device
    rollout, step = rl.RolloutBuffer(24, envs, OBS, ACTION, device=device, seed=0), constant_step(envs, device)
    with place.kernels():
        yield measure_time(place, f"24 rollout adds, {envs} environments", partial(fill, rollout, step))
        numbers = [torch.zeros(24, envs, device=device) for _ in range(3)]
        flags = [torch.zeros(24, envs, dtype=torch.bool, device=device) for _ in range(2)]
        yield measure_time(place, "gae of 24 steps", lambda: rl.gae(*numbers, *flags, gamma=0.99, lam=0.95))


def others(place: Place) -> Iterator[Row]:
    """Buffers of FastTD3 (--fasttd3 PATH/fast_td3_utils.py) and TorchRL, if available."""
    envs = place.sizes.many_envs
    step = constant_step(envs, place.device)
    if place.fasttd3 is not None:
        yield from _fasttd3(place, envs, step)
    if find_spec("torchrl") is not None:
        yield from _torchrl(place, envs, step)
    if place.fasttd3 is None:
        yield {"call": "FastTD3", "host µs": "no --fasttd3"}


def _fasttd3(place: Place, envs: int, step: dict[str, torch.Tensor]) -> Iterator[Row]:
    from tensordict import TensorDict  # noqa: PLC0415 (slow)

    spec = spec_from_file_location("fast_td3_utils", str(place.fasttd3))
    if spec is None or spec.loader is None:
        raise FileNotFoundError(place.fasttd3)
    module: Any = module_from_spec(spec)
    spec.loader.exec_module(module)
    done = torch.zeros(envs, dtype=torch.int64, device=place.device)
    after = {"rewards": step["reward"], "dones": done, "truncations": done, "observations": step["next_obs"]}
    batch = TensorDict({"observations": step["obs"], "actions": step["action"], "next": after}, [envs])
    for n_steps in (1, 3):
        buffer = module.SimpleReplayBuffer(envs, 64, OBS, ACTION, OBS, n_steps=n_steps, device=place.device)
        for _ in range(65):
            buffer.extend(batch)
        if n_steps == 1:
            yield measure_time(place, f"FastTD3 extend, {envs} environments", partial(buffer.extend, batch))
        per_env = max(place.sizes.batch // envs, 1)
        name = f"FastTD3 sample, {per_env * envs}, {n_steps} steps"
        yield measure_time(place, name, partial(buffer.sample, per_env))


def _torchrl(place: Place, envs: int, step: dict[str, torch.Tensor]) -> Iterator[Row]:
    from tensordict import TensorDict  # noqa: PLC0415 (slow)
    from torchrl.data import (  # noqa: PLC0415 (optional) # pyright: ignore[reportMissingImports]
        LazyTensorStorage,
        TensorDictReplayBuffer,
    )

    after = {"observation": step["next_obs"]}
    after |= {name: step[name].unsqueeze(-1) for name in ("reward", "terminated", "truncated")}
    batch = TensorDict({"observation": step["obs"], "action": step["action"], "next": after}, [envs])
    storage = LazyTensorStorage(64 * envs, device=place.device)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=place.sizes.batch)
    buffer.extend(batch)
    yield measure_time(place, f"TorchRL extend, {envs} environments", partial(buffer.extend, batch))
    yield measure_time(place, f"TorchRL sample, {place.sizes.batch}", buffer.sample)
