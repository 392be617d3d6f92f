"""ApexRL's specifications of observations."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from relive.compat import apexrl


class TestSpecs:
    def test_spaces_become_shapes_and_dtypes(self) -> None:
        spaces = gym.spaces
        spec = apexrl.TensorLeafSpec
        assert apexrl.space_to_spec(spaces.Box(0, 255, (3, 4), np.uint8)) == spec((3, 4), torch.uint8)
        assert apexrl.space_to_spec(spaces.Box(0, 1, (), np.float64)) == spec((1,), torch.float64)
        assert apexrl.space_to_spec(spaces.Discrete(3)) == spec((1,), torch.int64)
        assert apexrl.space_to_spec(spaces.MultiBinary(5)) == spec((5,), torch.int8)
        nested = spaces.Dict(a=spaces.Dict(b=spaces.MultiDiscrete([2, 3])))
        assert apexrl.space_to_spec(nested) == {"a": {"b": spec((2,), torch.int64)}}

    @pytest.mark.parametrize("space", [gym.spaces.Tuple((gym.spaces.Discrete(2),)), gym.spaces.Text(3)])
    def test_other_spaces_are_refused(self, space: Any) -> None:
        with pytest.raises(NotImplementedError, match=f"^observation space: expected .*, got {type(space).__name__}"):
            apexrl.space_to_spec(space)

    def test_a_leaf_is_a_value(self) -> None:
        leaf = apexrl.TensorLeafSpec((2,), torch.uint8)
        assert leaf == apexrl.TensorLeafSpec(shape=(2,), dtype=torch.uint8)
        with pytest.raises(AttributeError):
            leaf.shape = (3,)  # type: ignore[misc]
