"""docs/extending.md is true inside the package too: in a copy of it, a sampler, a view and a memory are added, each one
file and its export, and are used, saved, loaded and inspected."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import relive

SAMPLER = """
from dataclasses import dataclass

import torch

from relive.replay.samplers.sampler import Sampler


@dataclass
class Newest(Sampler):
    window: int

    def on_bind(self):
        self.times = torch.zeros(self.storage.num_slots, dtype=torch.int64)

    def sample(self, count):
        slots = self.storage.stored()
        ids = self.storage.ids(slots)
        recent = slots[ids // self.storage.num_envs >= self.storage.heads[ids % self.storage.num_envs] - self.window]
        chosen = recent[self.rng.below(torch.tensor(len(recent)), count)]
        self.times.index_add_(0, chosen, torch.ones_like(chosen))
        return chosen, None

    def on_write(self, slots):
        self.times[slots] = 0

    def state(self):
        return {"times": self.times}

    def load_state(self, saved):
        self.times = saved["times"].clone()
"""
VIEW = """
from dataclasses import dataclass

from relive.replay.views.transition import Transition


@dataclass(frozen=True)
class Delta:
    def plan(self, schema):
        return Transition().plan(schema)

    def finish(self, batch, context):
        return batch | {("delta",): batch[("next_obs",)] - batch[("obs",)]}
"""
MEMORY = """
import torch

from relive.storage import LocalAllocator, Memory


class MeteredAllocator(LocalAllocator):
    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.name, self.nbytes = "metered", 0

    def allocate(self, name, shape, dtype):
        tensor = super().allocate(name, shape, dtype)
        self.nbytes += tensor.nbytes
        return tensor


def metered():
    return Memory(torch.device("cpu"), allocator=lambda buffer: MeteredAllocator())
"""
SCRIPT = """
import sys

import torch

import relive as rl
from relive.storage import metered
from relive.replay.samplers import Newest
from relive.replay.views import Delta

folder = sys.argv[1]
replay = rl.ReplayBuffer(40, obs=1, action=(), sampler=Newest(10), device=metered(), seed=0)
for t in range(60):
    replay.add([float(t * t)], 0.0, float(t), False, False, [float((t + 1) ** 2)])
batch = replay.sample(200, Delta())
assert set(batch["reward"].tolist()) == set(range(50, 60))
assert torch.equal(batch["delta"].squeeze(1), 2 * batch["reward"] + 1)
assert replay.storage.rows.allocator.nbytes >= replay.nbytes
replay.check()
replay.save(folder)
again = rl.load(folder, device=metered())
assert again.sampler == Newest(10)
assert torch.equal(again.sampler.times, replay.sampler.times)
assert torch.equal(again.sample(50, Delta())["index"], replay.sample(50, Delta())["index"])
assert rl.inspect(again).as_dict()["source"]["rows"] == 40
state = replay.state_dict()
again.load_state_dict(state)
again.check()
assert rl.inspect(folder).as_dict()["source"]["rows"] == 40
print("all of it")
"""


def exported(package: Path, line: str, name: str) -> None:
    """Add an export to the `__init__.py` of a package."""
    file = package / "__init__.py"
    code = file.read_text(encoding="utf-8")
    assert "__all__ = [" in code
    file.write_text(code.replace("__all__ = [", f'{line}\n\n__all__ = ["{name}", ', 1), encoding="utf-8")


@pytest.mark.thorough
def test_a_sampler_a_view_and_a_memory_are_one_file_and_an_export_each(tmp_path: Path) -> None:
    assert relive.__file__ is not None
    copy = tmp_path / "source" / "relive"
    shutil.copytree(Path(relive.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for folder, name, code, export in (
        ("replay/samplers", "newest", SAMPLER, "Newest"),
        ("replay/views", "delta", VIEW, "Delta"),
        ("storage", "metered", MEMORY, "metered"),
    ):
        (copy / folder / f"{name}.py").write_text(code, encoding="utf-8")
        package = "relive." + folder.replace("/", ".")
        exported(copy / folder, f"from {package}.{name} import {export}", export)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "saved")],
        env={**os.environ, "PYTHONPATH": str(copy.parent)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "all of it", done.stderr
