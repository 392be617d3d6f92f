"""ApexRL's functions for observations and their specifications."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from relive.compat import apexrl
from relive.compat.apexrl import utils


def tree(*lead: int) -> dict[str, Any]:
    return {
        "obs": {"camera": torch.full((*lead, 2, 3), 7, dtype=torch.uint8), "pose": torch.full((*lead, 4), 0.5)},
        "privileged_obs": torch.full((*lead, 5), 2.0),
    }


class TestTrees:
    def test_a_space_says_what_is_seen_by_whom(self) -> None:
        box = spaces.Box(-1, 1, (3,))
        both = spaces.Dict({"obs": box, "privileged_obs": spaces.Discrete(2)})
        assert utils.actor_space_from_observation_space(both) == both["obs"]
        assert utils.critic_space_from_observation_space(both) == both["privileged_obs"]
        assert utils.critic_space_from_observation_space(spaces.Dict({"critic_obs": box})) == box
        assert utils.actor_space_from_observation_space(box) == box
        assert utils.critic_space_from_observation_space(box) is None
        assert utils.spec_numel(utils.space_to_spec(both)) == 4

    def test_an_observation_is_split_alike(self) -> None:
        given = tree(2)
        actor, critic = utils.split_actor_critic_observations(given)
        assert actor is given["obs"]
        assert critic is given["privileged_obs"]
        assert utils.split_actor_critic_observations({"obs": 1, "critic_obs": 2}) == (1, 2)
        assert utils.split_actor_critic_observations(actor) == (actor, None)

    def test_arrays_become_tensors_and_dicts_tensordicts(self) -> None:
        actual = utils.observation_to_tensor({"x": np.zeros((2, 3)), "n": np.ones(2, int)}, "cpu", torch.float32)
        assert isinstance(actual, TensorDict)
        assert (actual["x"].dtype, actual["n"].dtype) == (torch.float32, torch.float32)
        kept = torch.ones(2, dtype=torch.int32)
        assert utils.observation_to_tensor((kept, {}), "cpu", torch.float32) is kept
        assert utils.observation_to_device(None, "cpu") is None
        moved = utils.observation_to_device(tree(2), "cpu", torch.float64)
        assert moved["obs", "pose"].dtype == torch.float64
        assert moved["obs", "camera"].dtype == torch.uint8

    def test_stacks_copies_zeros_and_rows(self) -> None:
        stacked = utils.stack_observations([tree(), tree(), tree()])
        assert stacked.batch_size == (3,)
        assert utils.observation_batch_size(stacked) == 3
        copied = utils.clone_observation(stacked)
        copied["obs", "pose"].zero_()
        assert stacked["obs", "pose"].all()
        assert not utils.zeros_like_observation(stacked)["obs", "camera"].any()
        assert utils.observation_index(stacked, torch.tensor([0, 2]))["privileged_obs"].shape == (2, 5)
        utils.observation_set_index(copied, 1, utils.observation_index(stacked, 1))
        assert copied["obs", "pose"][:, 0].tolist() == [0.0, 0.5, 0.0]
        with pytest.raises(TypeError, match="^value: expected a dict with"):
            utils.observation_set_index(copied, 1, torch.zeros(3))
        with pytest.raises(ValueError, match="^observation: expected at least one tensor"):
            utils.observation_batch_size({})

    def test_flat_forms(self) -> None:
        flat = utils.flatten_time_env_observation(TensorDict(tree(2, 3), [2, 3]))
        assert flat.batch_size == (6,)
        features = utils.flatten_observation(flat)
        assert features.shape == (6, 6 + 4 + 5)
        assert features.dtype == torch.float32
        assert utils.flatten_observation(torch.tensor(3)).tolist() == [[3.0]]
        assert utils.flatten_observation(torch.tensor([3, 4])).tolist() == [[3.0], [4.0]]
        with pytest.raises(ValueError, match="^observation: expected at least one tensor, got an empty TensorDict"):
            utils.flatten_observation({})

    def test_memory_for_a_specification(self) -> None:
        spec = {"camera": utils.TensorLeafSpec((2, 3), torch.uint8), "pose": (4,)}
        memory = utils.allocate_observation_storage((5, 2), spec, "cpu", torch.float64)
        assert memory.batch_size == (5, 2)
        assert (memory["camera"].dtype, memory["pose"].dtype) == (torch.uint8, torch.float64)
        assert memory["camera"].shape == (5, 2, 2, 3)


class TestSpecs:
    def test_spaces_become_shapes_and_dtypes(self) -> None:
        spec = apexrl.TensorLeafSpec
        assert apexrl.space_to_spec(spaces.Box(0, 255, (3, 4), np.uint8)) == spec((3, 4), torch.uint8)
        assert apexrl.space_to_spec(spaces.Box(0, 1, (), np.float64)) == spec((1,), torch.float64)
        assert apexrl.space_to_spec(spaces.Discrete(3)) == spec((1,), torch.int64)
        assert apexrl.space_to_spec(spaces.MultiBinary(5)) == spec((5,), torch.int8)
        nested = spaces.Dict(a=spaces.Dict(b=spaces.MultiDiscrete([2, 3])))
        assert apexrl.space_to_spec(nested) == {"a": {"b": spec((2,), torch.int64)}}

    @pytest.mark.parametrize("space", [spaces.Tuple((spaces.Discrete(2),)), spaces.Text(3)])
    def test_other_spaces_are_refused(self, space: Any) -> None:
        with pytest.raises(NotImplementedError, match=f"^observation space: expected .*, got {type(space).__name__}"):
            apexrl.space_to_spec(space)

    def test_a_leaf_is_a_value(self) -> None:
        leaf = apexrl.TensorLeafSpec((2,), torch.uint8)
        assert leaf == apexrl.TensorLeafSpec(shape=(2,), dtype=torch.uint8)
        with pytest.raises(AttributeError):
            leaf.shape = (3,)  # type: ignore[misc]
