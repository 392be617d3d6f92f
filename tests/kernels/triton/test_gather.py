"""Reading items of many columns in one launch, and minibatches of rollouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import relive as rl
from relive.kernels.reader import make_reader
from tests.kernels.triton.interpreter import in_every_order, interpreted
from tests.kernels.triton.launches import WAITS, Launches

DTYPES = (
    torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.bool, torch.complex64, torch.complex128, torch.uint16,
)  # fmt: skip
STEPS, ENVS = 5, 4


def column(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a column of recognisable bits, NaN included; bools are 0 and 1."""
    form = (STEPS, ENVS, *shape)
    size = torch.empty(form, dtype=dtype).numel() * torch.empty(0, dtype=dtype).element_size()
    most = 2 if dtype == torch.bool else 256
    some = torch.randint(0, most, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return some.view(dtype).view(form)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


columns = st.lists(
    st.tuples(st.sampled_from([(), (1,), (3,), (2, 5), (0,), (70,), (33, 9)]), st.sampled_from(DTYPES)),
    min_size=1,
    max_size=6,
)


@pytest.mark.thorough
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(columns, st.lists(st.integers(-1, STEPS * ENVS - 1), max_size=30), st.booleans())
def test_items_of_any_dtype_and_shape_are_those_of_torch(
    forms: list[tuple[tuple[int, ...], torch.dtype]], chosen: list[int], given_out: bool
) -> None:
    tensors = [column(shape, dtype, seed) for seed, (shape, dtype) in enumerate(forms)]
    index = torch.tensor([7, *chosen, 3])
    with interpreted():
        triton_reader = make_reader(tensors, 2, STEPS * ENVS)
        if given_out:
            items = [torch.empty((len(chosen), *shape), dtype=dtype) for shape, dtype in forms]
            triton_reader.take_into(index, 1, 1 + len(chosen), items, padded=True)
        else:
            items = triton_reader.take(index, 1, 1 + len(chosen), padded=True)
    rows = index[1:-1]
    for item, tensor in zip(items, tensors, strict=True):
        if tensor.numel():
            expected = bits(tensor).view(STEPS * ENVS, -1)[rows.clamp(min=0)]
            expected[rows < 0] = 0
            assert torch.equal(bits(item), expected.flatten())


def test_targets_with_strides_are_filled() -> None:
    tensors = [column((3,), torch.float32, 0), column((), torch.int64, 1)]
    targets = [torch.empty(3, 6)[:, ::2], torch.empty(6, dtype=torch.int64)[::2]]
    assert not any(target.is_contiguous() for target in targets)
    index = torch.tensor([4, 0, 19])
    with interpreted():
        make_reader(tensors, 2, STEPS * ENVS).take_into(index, 0, 3, targets)
    for target, tensor in zip(targets, tensors, strict=True):
        assert torch.equal(bits(target), bits(tensor.flatten(0, 1)[index]))


def filled(**settings: Any) -> rl.RolloutBuffer:
    observation = {"robot": 3, "image": rl.Field((2, 2), torch.uint8)}
    rollout = rl.RolloutBuffer(STEPS, ENVS, obs=observation, action=2, seed=0, **settings)
    for time in range(STEPS):
        number = torch.arange(ENVS) + 10.0 * time
        obs = {"robot": number[:, None].expand(-1, 3), "image": number.byte()[:, None, None].expand(-1, 2, 2)}
        ends = torch.zeros(ENVS, dtype=torch.bool)
        rollout.add(obs, number[:, None].expand(-1, 2), number, ends, ends, value=number, log_prob=number)
    return rollout


def test_a_minibatch_takes_at_most_two_launches_and_never_waits() -> None:
    with interpreted():
        rollout = filled()
        with Launches() as launches:
            batches = list(rollout.minibatches(5, epochs=2))
    assert len(batches) == 8
    assert launches.names.count("read_kernel") == 8
    assert len(launches.names) <= 2 * len(batches)
    assert not WAITS & set(launches.names)


def test_every_transition_comes_once_an_epoch_with_all_its_fields() -> None:
    def run() -> Any:
        rollout = filled()
        rollout.compute_advantage(torch.ones(ENVS))
        return [dict(batch.flatten_keys()) for batch in rollout.minibatches(6, drop_last=False)]

    with interpreted():
        batches = in_every_order(run, 3)
    assert [len(batch["index"]) for batch in batches] == [6, 6, 6, 2]
    index = torch.cat([batch["index"] for batch in batches])
    assert index.sort().values.tolist() == list(range(STEPS * ENVS))
    reward = torch.cat([batch["reward"] for batch in batches])
    assert torch.equal(reward, index % ENVS + 10.0 * (index // ENVS))
    native = filled()
    native.compute_advantage(torch.ones(ENVS))
    expected = native.data.flatten(0, 1)
    torch.testing.assert_close(torch.cat([batch["advantage"] for batch in batches]), expected["advantage"][index])
    for batch in batches:
        assert torch.equal(batch["obs.robot"], batch["reward"][:, None].expand(-1, 3))
        assert torch.equal(batch["obs.image"], batch["reward"].byte()[:, None, None].expand(-1, 2, 2))


def test_reset_rows_and_epochs_into_the_same_tensors() -> None:
    with interpreted():
        rollout = filled()
        batch = next(iter(rollout.minibatches(10)))
        for each in rollout.minibatches(10, epochs=2, out=batch):
            assert each is batch
            assert torch.equal(each["reward"], each["index"] % ENVS + 10.0 * (each["index"] // ENVS))
