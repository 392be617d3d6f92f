"""The distillation buffer, which ApexRL documents but does not ship."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import relive as rl
from relive.compat import apexrl


class TestDistillation:
    def test_rows_and_batches_are_kept_newest_and_whole(self) -> None:
        buffer = apexrl.DistillationBuffer(5, (2,), "cpu", seed=0)
        rows = torch.arange(7.0).unsqueeze(1)
        buffer.add(rows[:6].expand(-1, 2), rows[:6] + 0.7)
        buffer.add(rows[6].expand(2), rows[6] + 0.7)
        assert buffer.size == len(buffer) == buffer.capacity == 5
        assert (buffer.obs_shape, buffer.device) == ((2,), torch.device("cpu"))
        drawn = torch.cat([torch.cat(buffer.sample(5), 1) for _ in range(40)])
        assert set(drawn[:, 0].tolist()) == {2.0, 3.0, 4.0, 5.0, 6.0}
        assert torch.equal(drawn[:, 2], drawn[:, 0] + 0.7)
        buffer.clear()
        assert len(buffer) == 0

    def test_the_first_actions_say_what_an_action_is(self) -> None:
        buffer = apexrl.DistillationBuffer(5, {"x": (2,)}, "cpu")
        buffer.add({"x": torch.zeros(2, 2)}, torch.tensor([3, 4]))
        obs, actions = buffer.sample(2)
        assert isinstance(obs, TensorDict)
        assert actions.dtype == torch.int64
        with pytest.raises(rl.SchemaError, match="action: expected int64, got float32"):
            buffer.add({"x": torch.zeros(2, 2)}, torch.tensor([0.5, 0.5]))
        with pytest.raises(TypeError, match="expected a dict with|expected a tensor"):
            buffer.add(torch.zeros(2, 2), torch.tensor([3, 4]))

    def test_errors_are_those_of_the_replay_buffer(self) -> None:
        with pytest.raises(ValueError, match="^capacity: expected a positive int, got 0"):
            apexrl.DistillationBuffer(0, (2,), "cpu")
        buffer = apexrl.DistillationBuffer(5, (2,), "cpu")
        with pytest.raises(ValueError, match="^batch_size: expected at most 0"):
            buffer.sample(1)
        with pytest.raises(ValueError, match="^batch_size: expected an int of at least 1, got 0"):
            buffer.sample(0)

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
    @pytest.mark.parametrize("rows", [0, 2, 5])
    def test_copies_hold_the_same_rows(self, copied: Any, rows: int) -> None:
        buffer = apexrl.DistillationBuffer(3, (1,), seed=0)
        for row in range(rows):
            buffer.add(torch.full((1,), float(row)), torch.tensor(row))
        other = copied(buffer)
        assert (len(other), other.device) == (len(buffer), buffer.device)
        other.add(torch.full((1,), 9.0), torch.tensor(9))
        drawn = torch.cat([other.sample(len(other))[1] for _ in range(30)])
        assert set(drawn.tolist()) == {9, *range(max(0, rows - 2), rows)}
        assert len(buffer) == min(rows, 3)
