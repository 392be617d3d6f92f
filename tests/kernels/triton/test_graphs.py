"""Simulated CUDA graphs: a captured call is a list of launches, which a replay repeats without any other Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest
import torch

import relive as rl
from relive.replay.samplers import prioritized
from tests.kernels.triton.interpreter import interpreted

pytest.importorskip("triton", reason="needs Triton: pip install 'relive[triton]'")

from relive.kernels.triton.launching import BoundKernel
from relive.replay import triton_backend

ENVS, BATCH = 3, 8


class Graph:
    """Records the launches made inside `captured`, which are not run, and replays them."""

    def __init__(self) -> None:
        self._launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    @contextmanager
    def captured(self) -> Iterator[None]:
        def record(*arguments: Any, **constants: Any) -> None:
            self._launches.append((arguments, constants))

        def is_capturing_graph(device: torch.device) -> bool:
            return True

        with ExitStack() as patches:
            patches.enter_context(patch.object(BoundKernel, "__call__", record))
            for module in (triton_backend, prioritized):
                patches.enter_context(patch.object(module, "is_capturing_graph", is_capturing_graph))
            yield

    def replay(self) -> None:
        for arguments, constants in self._launches:
            BoundKernel.__call__(*arguments, **constants)


class Learner:
    """A buffer, the tensors of its next step, and a round of a training loop."""

    def __init__(self) -> None:
        self.replay = rl.ReplayBuffer(5 * ENVS, 2, 1, num_envs=ENVS, sampler=rl.Prioritized(), seed=0)
        self.step = {"obs": torch.zeros(ENVS, 2), "action": torch.zeros(ENVS, 1), "reward": torch.zeros(ENVS)}
        self.step |= {name: torch.zeros(ENVS, dtype=torch.bool) for name in ("terminated", "truncated")}
        self.step["next_obs"] = torch.zeros(ENVS, 2)
        self.set_step(0)
        self.replay.add(**self.step)
        self.out = self.replay.sample(BATCH)

    def set_step(self, number: int) -> None:
        """Set the tensors of step `number`, in which some environments start an episode and some end one."""
        is_start = torch.tensor([number % 3 == env for env in range(ENVS)]).view(-1, 1) * 100.0
        self.step["obs"].fill_(number).add_(is_start)
        self.step["next_obs"].fill_(number + 1)
        self.step["reward"].fill_(number + 1)
        self.step["terminated"].copy_(torch.tensor([number % 4 == env for env in range(ENVS)]))

    def round(self) -> None:
        self.replay.add(**self.step)
        self.replay.sample(BATCH, out=self.out)
        self.replay.update_priority(self.out["index"], self.out["reward"])


def assert_same(a: Learner, b: Learner) -> None:
    for first, second in zip(a.replay.storage.rows.tensors, b.replay.storage.rows.tensors, strict=True):
        assert torch.equal(first, second)
    for name in ("obs", "next_obs", "reward", "index", "weight"):
        assert torch.equal(a.out[name], b.out[name])
    masses = [learner.replay.sampler.state()["mass"] for learner in (a, b)]
    assert torch.equal(*masses)
    streams: list[Any] = [learner.replay._random for learner in (a, b)]
    assert torch.equal(streams[0].numbers, streams[1].numbers)
    assert len(a.replay) == len(b.replay)


def test_replays_equal_eager_calls_also_after_clear_and_from_another_thread() -> None:
    with interpreted():
        learner, eager, graph = Learner(), Learner(), Graph()
        with graph.captured():
            learner.round()
        for number in range(1, 9):
            for each in (learner, eager):
                each.set_step(number)
                if number == 5:
                    each.replay.clear()
                if number in (3, 7):
                    each.replay.add(**each.step)
            if number == 4:
                thread = Thread(target=graph.replay)
                thread.start()
                thread.join()
            else:
                graph.replay()
            eager.round()
            assert_same(learner, eager)
            learner.replay.check()


def test_after_clear_the_host_reads_whether_replays_have_stored_rows() -> None:
    with interpreted():
        learner, graph = Learner(), Graph()
        with graph.captured():
            learner.replay.add(**learner.step)
        learner.replay.clear()
        with pytest.raises(rl.NotReadyError):
            learner.replay.sample(2)
        learner.replay.check()
        graph.replay()
        assert len(learner.replay) == ENVS
        assert learner.replay.sample(2).batch_size == (2,)
        learner.replay.check()
