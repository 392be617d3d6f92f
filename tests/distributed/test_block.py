"""Blocks return the steps that were packed, and contain every observation once."""

import pytest

pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relive.distributed.protocol import ServicePlan, pack_block, unpack_block
from relive.schema.fields import Field
from tests.distributed.local import make_plan, make_steps


def _fields(dtype: torch.dtype) -> ServicePlan:
    return make_plan(8, 2, obs={"a": Field(3, dtype), "b": ()}, action=Field((2, 2), torch.int16))


@given(
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.float64]),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_a_block_gives_back_every_bit(steps: int, envs: int, dtype: torch.dtype, data: st.DataObject) -> None:
    schema = _fields(dtype).schema
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))

    def leaf(field: Field) -> torch.Tensor:
        raw = rng.integers(0, 2, (steps, envs, *field.shape, field.dtype.itemsize), dtype=np.uint8)
        return torch.from_numpy(raw).view(field.dtype).squeeze(-1)

    leaves = [leaf(field) for field in schema.fields]
    nexts = [leaf(schema.fields[i]) for i in schema.leaf_indices["obs"]]
    for t, e in np.ndindex(steps - 1, envs):
        if data.draw(st.booleans()):
            for i, after in zip(schema.leaf_indices["obs"], nexts, strict=True):
                after[t, e] = leaves[i][t + 1, e]
    block = pack_block(schema, leaves, nexts)
    actual, following = unpack_block(schema, block)
    for expected, got in zip((*leaves, *nexts), (*actual, *following), strict=True):
        bits = (torch.as_tensor(x).contiguous().view(torch.uint8) for x in (expected, got))
        assert torch.equal(*bits)


def test_an_observation_travels_once() -> None:
    schema = make_plan(8, 2).schema
    steps = make_steps([0, 1], 0, 10, length=5)
    tensors = [torch.from_numpy(np.asarray(steps[name])) for name in schema.names]
    block = pack_block(schema, tensors, [torch.from_numpy(steps["next_obs"])])
    assert [leaf.shape for leaf in block.leaves[:2]] == [(11, 2, 2), (10, 2)]
    assert block.breaks.tolist() == [8, 9], "the last steps of the first episodes; the others end with the block"
    assert block.next_obs[0].tolist() == [[0.0, -1.0], [1.0, -1.0]]


def test_a_block_has_memory_of_its_own() -> None:
    schema = make_plan(8, 1).schema
    steps = make_steps([0], 0, 3)
    tensors = [torch.from_numpy(np.asarray(steps[name])) for name in schema.names]
    block = pack_block(schema, tensors, [torch.from_numpy(steps["next_obs"])])
    before = [leaf.copy() for leaf in block.leaves]
    for tensor in tensors:
        tensor.zero_()
    assert all(np.array_equal(*pair) for pair in zip(before, block.leaves, strict=True))
