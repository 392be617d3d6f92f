"""The device and sizes of a report, and test data shared by its sections."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import relive as rl
from relive import kernels

OBS, ACTION = 48, 12
Row = dict[str, Any]
"""One row of a table."""


class NotHere(Exception):
    """Raised by a section that this machine does not support."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the checks and measurements."""

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


SMALL = Sizes((3, 8), 7, 16, 40, 5000, 2, 2)
"""Sizes for Triton's interpreter."""


@dataclass
class Place:
    """The device under test: a GPU, or the CPU with Triton's interpreter."""

    device: torch.device
    sizes: Sizes
    fasttd3: str | None = None
    copy_speed: float = 0.0
    """Copy bandwidth of the device in bytes per second; 0 if unknown."""

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def require_gpu(self) -> None:
        if not self.is_gpu:
            raise NotHere("needs a GPU")

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Context manager that uses Triton's kernels, as on a GPU."""
        if self.is_gpu:
            yield
        else:
            with kernels.force("triton"):
                yield

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def replay(self, envs: int, rows: int, *, device: Any = None, **options: Any) -> rl.ReplayBuffer:
        """Make a buffer with `rows` rows per environment."""
        where = self.device if device is None else device
        return rl.ReplayBuffer(rows * envs, OBS, ACTION, num_envs=envs, device=where, seed=0, **options)


def episodes(envs: int, steps: int, seed: int = 0, obs: int = OBS) -> Iterator[dict[str, torch.Tensor]]:
    """Random steps: one in five ends an episode, and one in ten is followed by an unannounced reset."""
    random = torch.Generator().manual_seed(seed)
    current_obs = torch.rand(envs, obs, generator=random)
    for _ in range(steps):
        following = torch.rand(envs, obs, generator=random)
        ended = torch.rand(envs, generator=random) < 0.2
        truncated = ended & (torch.rand(envs, generator=random) < 0.5)
        yield {
            "obs": current_obs, "action": torch.rand(envs, ACTION, generator=random),
            "reward": torch.rand(envs, generator=random), "terminated": ended & ~truncated, "truncated": truncated,
            "next_obs": following,
        }  # fmt: skip
        resets = ended | (torch.rand(envs, generator=random) < 0.1)
        current_obs = torch.where(resets.view(-1, 1), torch.rand(envs, obs, generator=random), following)


def constant_step(envs: int, device: torch.device, obs: int = OBS) -> dict[str, torch.Tensor]:
    """A step whose next observation is its observation: it can be added repeatedly."""
    (step,) = episodes(envs, 1, obs=obs)
    step["next_obs"] = step["obs"].clone()
    flags = {name: torch.zeros(envs, dtype=torch.bool) for name in ("terminated", "truncated")}
    return {name: value.to(device) for name, value in (step | flags).items()}


def fill(rollout: rl.RolloutBuffer, step: dict[str, torch.Tensor]) -> None:
    """Fill a rollout by adding one step repeatedly."""
    rollout.clear()
    rest = {name: value for name, value in step.items() if name != "next_obs"}
    for _ in range(rollout.num_steps):
        rollout.add(**rest, value=step["reward"], log_prob=step["reward"])


def seconds_of(call: Callable[[], object], place: Place) -> float:
    """Seconds of a call, including the work of the device."""
    place.wait()
    start = time.perf_counter()
    call()
    place.wait()
    return time.perf_counter() - start
