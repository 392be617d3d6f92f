"""The torch path: few launches, no waiting for a device, no graph breaks."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from relive import estimators as rl
from relive import kernels
from tests.estimators.calls import ARGUMENTS, SETTINGS, assert_equal, call, every_estimator, sample
from tests.tiers import select


class Launches(TorchDispatchMode):
    """Records the names of all ops dispatched in its `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def launches(name: str, steps: int, *, masked: bool = False) -> list[str]:
    tensors = sample(steps, 6)
    tensors["mask"] = torch.rand(steps, 6) < 0.8 if masked else None
    with kernels.force_torch(), Launches() as counter:
        call(name, tensors, **SETTINGS[name])
    return counter.names


@pytest.mark.parametrize("masked", [False, True])
def test_gae_of_24_steps_takes_at_most_40_launches(masked: bool) -> None:
    assert len(launches("gae", 24, masked=masked)) <= 40


@every_estimator
def test_launches_grow_with_the_logarithm_of_the_steps(name: str) -> None:
    counts = [len(launches(name, steps)) for steps in (64, 128, 256, 512, 1024)]
    growth = {after - before for before, after in pairwise(counts)}
    assert all(more <= 7 for more in growth)
    assert len(growth) == 1


@every_estimator
def test_nothing_waits_for_the_device(name: str) -> None:
    waiting = ("_local_scalar_dense", "nonzero", "masked_select", "index.Tensor", "equal")
    names = launches(name, 24, masked=True)
    assert not [op for op in names if any(word in op for word in waiting)]


@every_estimator
def test_tensors_without_data_give_shapes(name: str) -> None:
    tensors = {k: None if x is None else x.to("meta") for k, x in sample(24, 6, 2).items()}
    for mask in (None, torch.ones(24, 6, dtype=torch.bool, device="meta")):
        for output in call(name, {**tensors, "mask": mask}, **SETTINGS[name]):
            assert output.device.type == "meta"
            assert output.shape == (24, 6, 2)


def test_the_other_functions_give_shapes_of_tensors_without_data_too() -> None:
    reward, flag = torch.zeros(5, 8, device="meta"), torch.zeros(5, 8, dtype=torch.bool, device="meta")
    assert rl.discounted_return(reward, flag, flag, gamma=0.9, last_value=reward[0]).shape == (5, 8)
    for mask in (None, flag):
        assert [x.shape for x in rl.group_advantage(reward, flag, group_size=2, mask=mask)] == [(5, 8)] * 3
    assert rl.normalize(reward, flag).shape == (5, 8)
    assert rl.explained_variance(reward, reward).shape == ()


@every_estimator
@pytest.mark.parametrize("masked", select(True, of=[False, True]))
def test_compiling_gives_one_graph_and_the_same_numbers(name: str, masked: bool) -> None:
    torch.compiler.reset()
    tensors = sample(9, 6)
    tensors["mask"] = torch.rand(9, 6) < 0.8 if masked else None
    estimator, settings = getattr(rl, name), SETTINGS[name]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(*arguments: Tensor, mask: Tensor | None) -> Any:
        return estimator(*arguments, **settings, mask=mask)

    got = compiled(*(tensors[k] for k in ARGUMENTS[name]), mask=tensors["mask"])  # pyright: ignore[reportArgumentType]
    got = got if isinstance(got, tuple) else (got,)
    for mine, want in zip(got, call(name, tensors, **settings), strict=True):
        assert_equal(mine, want)


def test_compiling_the_other_functions_gives_one_graph_and_the_same_numbers() -> None:
    torch.compiler.reset()
    tensors = sample(9, 6)

    def everything(reward: Tensor, value: Tensor, terminated: Tensor, truncated: Tensor) -> tuple[Tensor, ...]:
        return (
            rl.discounted_return(reward, terminated, truncated, gamma=0.9, last_value=value[0]),
            *rl.group_advantage(reward, terminated, group_size=3, gamma=0.9, mask=truncated),
            rl.normalize(reward, terminated),
            rl.explained_variance(value, reward, mask=truncated),
        )

    arguments = [tensors[k] for k in ("reward", "value", "terminated", "truncated")]
    compiled = torch.compile(everything, backend="aot_eager", fullgraph=True)
    for mine, want in zip(compiled(*arguments), everything(*arguments), strict=True):  # pyright: ignore[reportArgumentType]
        assert_equal(mine, want) if mine.is_floating_point() else None
        assert mine.dtype == want.dtype


def test_vmap_over_several_rollouts_is_the_same_as_one_by_one(backend: str) -> None:
    tensors = [sample(7, 5, seed=seed) for seed in range(3)]
    stacked = [torch.stack([t[k] for t in tensors]) for k in ARGUMENTS["gae"]]  # pyright: ignore[reportArgumentType, reportCallIssue]
    mapped = torch.func.vmap(partial(rl.gae, **SETTINGS["gae"]))(*stacked)
    for i, one in enumerate(tensors):
        for mine, want in zip(mapped, call("gae", one, **SETTINGS["gae"]), strict=True):
            assert_equal(mine[i], want)
