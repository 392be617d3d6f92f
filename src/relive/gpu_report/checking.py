"""Sections that compare a device with the host, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

import relive as rl
from relive.gpu_report.place import ACTION, OBS, NotHere, Place, Row, constant_step, episodes, fill, seconds_of

VIEWS: dict[str, Any] = {
    "transitions": None, "3 steps": rl.NStep(3, 0.99), "sequences": rl.Sequence(6),
    "across episodes": rl.Sequence(6, 3, True),
}  # fmt: skip


def differences(a: Any, b: Any) -> list[str]:
    """Names of the fields in which two batches differ in any bit."""
    a, b = a.cpu(), b.cpu()
    paths = set(a.keys(True, True)) | set(b.keys(True, True))
    return sorted(
        str(path) for path in paths if not torch.equal(a.get(path, torch.empty(0)), b.get(path, torch.ones(1)))
    )


def require(condition: object, what: str) -> None:
    if not condition:
        raise AssertionError(what)


def _fill_both(
    place: Place, envs: int, rows: int, after: Callable[[Any, Any], None] | None = None, **options: Any
) -> tuple[rl.ReplayBuffer, rl.ReplayBuffer]:
    """Fill a host buffer and a device buffer with the same steps; call `after(host, device)` after each step."""
    host = place.replay(envs, rows, device="cpu", **options)
    with place.kernels():
        device_buffer = place.replay(envs, rows, **options)
    for step in episodes(envs, place.sizes.steps, seed=envs):
        host.add(**step)
        with place.kernels():
            device_buffer.add(**{name: value.to(place.device) for name, value in step.items()})
        if after is not None:
            after(host, device_buffer)
    return host, device_buffer


def correctness(place: Place) -> Iterator[Row]:
    """The same steps in a device buffer and in a host buffer."""
    for envs in place.sizes.envs:
        host, device_buffer = _fill_both(place, envs, place.sizes.steps - 2 if envs < 10_000 else 4)
        with place.kernels():
            device_buffer.check()
            require(len(host) == len(device_buffer), f"expected {len(host)} rows, got {len(device_buffer)}")
            ids = host.ids()
            require(torch.equal(ids, device_buffer.ids().cpu()), "the ids of the stored rows differ")
            ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))[:20_000]]
            read = {name: device_buffer.read(ids.to(place.device), view) for name, view in VIEWS.items()}
        differing_fields = {name: differences(host.read(ids, view), read[name]) for name, view in VIEWS.items()}
        require(not any(differing_fields.values()), f"batches differ: {differing_fields}")
        yield {"environments": envs, "rows": len(host), "compared": ", ".join(VIEWS), "result": "equal"}


def priorities(place: Place) -> Iterator[Row]:
    """The same priorities on the device and on the host, and draws in proportion to them."""

    def update(host: rl.ReplayBuffer, device_buffer: rl.ReplayBuffer) -> None:
        ids = host.ids()[::3]
        errors = torch.rand(len(ids), generator=torch.Generator().manual_seed(len(ids)))
        expected = host.update_priority(ids, errors)
        with place.kernels():
            stale = int(device_buffer.update_priority(ids.to(place.device), errors.to(place.device)))
        require(stale == expected, f"expected {expected} stale ids, got {stale}")

    for envs in place.sizes.envs[:3]:
        host, on_device = _fill_both(place, envs, place.sizes.steps - 2, update, sampler=rl.Prioritized())
        masses = [buffer.sampler.state()["mass"].cpu() for buffer in (host, on_device)]
        worst = float(((masses[0] - masses[1]).abs() / masses[0].clamp(min=1e-300)).max())
        require(worst < 1e-12, f"masses differ by up to {worst:.1e} of them")
        with place.kernels():
            on_device.check()
            index = on_device.sample(place.sizes.batch)["index"].cpu()
        require(set(index.tolist()) <= set(host.ids().tolist()), "a row was drawn that is not stored")
        yield {
            "environments": envs,
            "rows": len(host),
            "largest difference of masses": f"{worst:.1e}",
            "result": "equal",
        }


def philox(counter: list[int], key: int) -> list[int]:
    """Reference implementation of Philox 4×32 with ten rounds."""
    c, k = list(counter), [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def draws(place: Place) -> Iterator[Row]:
    """Random numbers against the reference algorithm, and uniformity of draws."""
    from relive.kernels.triton.stream import DeviceStream  # noqa: PLC0415 (which needs Triton)

    with place.kernels():
        stream = DeviceStream(11, place.device)
        both_draws = [stream.uniform(40, place.device).tolist() for _ in range(2)]
        key = int(stream.numbers[0])
    for call, numbers in enumerate(both_draws):
        words = [philox([i, call, 0, 0], key) for i in range(40)]
        require(numbers == [(((a << 31) ^ b) >> 10) * 2.0**-53 for a, b, _, _ in words], "numbers are not Philox's")
    yield {"what": "numbers of Philox", "result": "equal"}
    with place.kernels():
        replay = place.replay(3, 20)
        for step in episodes(3, 25):
            replay.add(**{name: value.to(place.device) for name, value in step.items()})
        batches = [replay.sample(1000)["index"].cpu() for _ in range(20)]
    counts = torch.cat(batches).unique(return_counts=True)[1].double()
    expected = 20_000 / len(replay)
    chi_squared = float(((counts - expected) ** 2 / expected).sum()) + expected * (len(replay) - len(counts))
    deviation = (chi_squared - len(replay) + 1) / math.sqrt(2 * len(replay) - 2)
    require(abs(deviation) < 6, f"χ² of draws is {deviation:.1f} standard deviations off")
    yield {"what": "uniform draws", "result": f"χ² {deviation:+.1f} standard deviations from its mean"}


class _Learner:
    """A buffer with static step tensors, and one round of a training loop."""

    def __init__(self, place: Place, device: torch.device | None = None) -> None:
        self.replay = place.replay(8, 6, sampler=rl.Prioritized(), device=device)
        self.step = constant_step(8, self.replay.device)
        self.replay.add(**self.step)
        self.out = self.replay.sample(16)
        self.round()

    def set_step(self, step: dict[str, torch.Tensor]) -> None:
        for name, value in step.items():
            self.step[name].copy_(value)

    def round(self) -> None:
        self.replay.add(**self.step)
        self.replay.sample(16, out=self.out)
        self.replay.update_priority(self.out["index"], self.out["reward"])

    def state(self) -> list[torch.Tensor]:
        tensors = [
            *self.replay.storage.rows.tensors,
            self.replay.sampler.state()["mass"],
            *self.out.values(True, True),
        ]
        return [tensor.cpu().clone() for tensor in tensors]


def _require_same(first: _Learner, second: _Learner, when: str) -> None:
    is_equal = all(torch.equal(a, b) for a, b in zip(first.state(), second.state(), strict=True))
    require(is_equal, f"the buffers differ {when}")
    first.replay.check()


def _on_stream(stream: Any, device: torch.device, call: Callable[[], object]) -> None:
    """Call on another stream, synchronised with the current stream before and after."""
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream(device).wait_stream(stream)


def graphs(place: Place) -> Iterator[Row]:
    """A captured round against eager rounds: after clear, mixed with eager calls, on another stream."""
    place.require_gpu()
    captured_learner, eager_learner = _Learner(place), _Learner(place)
    for learner in (captured_learner, eager_learner):  # warm up, as a capture requires
        learner.round()
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.Stream(place.device)
    with torch.cuda.graph(graph):
        captured_learner.round()
    for number, step in enumerate(episodes(8, 9, seed=1)):
        for learner in (captured_learner, eager_learner):
            learner.set_step(step)
            if number == 4:
                learner.replay.clear()
            if number in (2, 6):
                learner.replay.add(**learner.step)
        if number == 7:
            _on_stream(other, place.device, graph.replay)
        else:
            graph.replay()
        eager_learner.round()
        _require_same(captured_learner, eager_learner, f"after replay {number}")
    yield {"what": "add, sample(out=) and update_priority, 9 replays", "result": "equal"}


def streams(place: Place) -> Iterator[Row]:
    """The same rounds on the current stream and on another one."""
    place.require_gpu()
    first, second = _Learner(place), _Learner(place)
    beside = torch.cuda.Stream(place.device)
    for step in episodes(8, 20, seed=2):
        for learner in (first, second):
            learner.set_step(step)
        first.round()
        _on_stream(beside, place.device, second.round)
    _require_same(first, second, "on another stream")
    yield {"what": "20 rounds on two streams", "result": "equal"}


def devices(place: Place) -> Iterator[Row]:
    """A buffer on the second device while the first one is current."""
    place.require_gpu()
    if torch.cuda.device_count() < 2:
        raise NotHere("needs two GPUs")
    on_first, on_second = _Learner(place, torch.device("cuda:0")), _Learner(place, torch.device("cuda:1"))
    for step in episodes(8, 12, seed=3):
        for learner in (on_first, on_second):
            learner.set_step(step)
            learner.round()
    _require_same(on_first, on_second, "on the second device")
    yield {"what": "12 rounds on cuda:0 and cuda:1", "result": "equal"}


def calls(place: Place) -> dict[str, Callable[[], object]]:
    """Calls of a training loop that must not synchronise."""
    uniform, prioritized = place.replay(8, 30), place.replay(8, 30, sampler=rl.Prioritized())
    step = constant_step(8, place.device)
    rollout = rl.RolloutBuffer(4, 8, OBS, ACTION, device=place.device, seed=0)
    for _ in range(9):
        uniform.add(**step)
        prioritized.add(**step)
    index, errors = prioritized.sample(16)["index"], torch.ones(16, device=place.device)
    env_ids = torch.tensor([1, 3], device=place.device)
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
        "rollout add": lambda: fill(rollout, step),
    }


def waits(place: Place) -> Iterator[Row]:
    """Each call in torch's sync debug mode, in which synchronisation raises."""
    place.require_gpu()
    previous = torch.cuda.get_sync_debug_mode()
    for name, call in calls(place).items():
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


def compiling(place: Place) -> Iterator[Row]:
    """Time of the first call, which compiles kernels, and of the third."""
    with place.kernels():
        for name, call in calls(place).items():
            first, _, third = (seconds_of(call, place) for _ in range(3))
            yield {"call": name, "first call": f"{first:.2f} s", "third call": f"{1e6 * third:,.0f} µs"}
