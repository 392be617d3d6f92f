"""Rows that end or start an episode, dummy steps, and final observations of truncated steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from tests.rollout.steps import N, make, step

LAYOUTS = (
    "objects",
    "the older name",
    "objects without a mask",
    "batched with a mask",
    "batched with a mask that is a tensor",
    "a batched tensor without a mask",
    "a list",
)


class TestFinalObservationsInTheWild:
    """Layouts of info["final_obs"] that libraries use under SAME_STEP."""

    finals = np.arange(2.0 * N).reshape(N, 2)

    def layouts(self) -> dict[str, dict[str, Any]]:
        objects = np.empty(N, object)
        objects[1] = self.finals[1]
        some = np.array([False, True, False])
        return {
            "objects": {"final_obs": objects, "_final_obs": some},
            "the older name": {"final_observation": objects, "_final_observation": some},
            "objects without a mask": {"final_obs": objects},
            "batched with a mask": {"final_obs": self.finals, "_final_obs": some},
            "batched with a mask that is a tensor": {"final_obs": self.finals, "_final_obs": torch.from_numpy(some)},
            "a batched tensor without a mask": {"final_obs": torch.from_numpy(self.finals)},
            "a list": {"final_obs": list(objects)},
        }

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_final_observations_are_found_in_every_layout(self, layout: str) -> None:
        rollout = make(count=0, autoreset="SAME_STEP")
        fields = step(0, truncated=np.array([False, True, False]))
        taken = (np.zeros((N, 2)), fields["reward"], fields["terminated"], fields["truncated"], self.layouts()[layout])
        rollout.add_step(fields["obs"], fields["action"], taken, value=fields["value"])
        assert rollout.final_obs.tolist() == [[2.0, 3.0]]

    def test_final_observations_are_found_in_batched_dicts(self) -> None:
        rollout = rl.RolloutBuffer(1, 2, obs={"a": 1, "b": ()}, action=(), autoreset="SAME_STEP")
        obs = {"a": np.zeros((2, 1)), "b": np.zeros(2)}
        info = {
            "final_obs": {"a": np.array([[1.0], [2.0]]), "b": np.array([3.0, 4.0])},
            "_final_obs": np.array([False, True]),
        }
        following = {name: value + 1 for name, value in obs.items()}
        rollout.add_step(obs, np.zeros(2), (following, np.zeros(2), np.zeros(2, bool), np.array([False, True]), info))
        assert rollout.final_obs["a"].tolist() == [[2.0]]
        assert rollout.final_obs["b"].tolist() == [4.0]

    def test_final_observations_are_found_in_dicts_with_masks_or_objects(self) -> None:
        obs = {"a": np.zeros((2, 1)), "b": np.zeros(2)}
        objects = np.empty((2, 2), object)
        objects[0, 1], objects[1, 1] = np.array([2.0]), 4.0
        some = np.array([False, True])
        for final in (
            {"a": np.array([[1.0], [2.0]]), "b": np.array([3.0, 4.0]), "_a": some, "_b": some},
            {"a": objects[0], "b": objects[1], "_a": some, "_b": some},
        ):
            rollout = rl.RolloutBuffer(1, 2, obs={"a": 1, "b": ()}, action=(), autoreset="SAME_STEP")
            taken = (obs, np.zeros(2), np.zeros(2, bool), some, {"final_obs": final})
            rollout.add_step({"a": np.ones((2, 1)), "b": np.ones(2)}, np.zeros(2), taken)
            assert rollout.final_obs["a"].tolist() == [[2.0]]
            assert rollout.final_obs["b"].tolist() == [4.0]

    def test_a_missing_final_observation_is_an_error(self) -> None:
        rollout = make(count=0, autoreset="SAME_STEP")
        fields = step(0, truncated=np.array([False, True, False]))
        taken = (np.zeros((N, 2)), fields["reward"], fields["terminated"], fields["truncated"], {})
        rollout.add_step(fields["obs"], fields["action"], taken, value=fields["value"])
        with pytest.raises(rl.NotReadyError, match="final_obs of step 0, environment 1"):
            rollout.compute_advantage(np.zeros(N))

    def test_a_final_observation_of_a_wrong_shape_is_refused_and_nothing_changes(self) -> None:
        rollout = make(count=1, autoreset="SAME_STEP")
        before = rollout.data.clone()
        fields = step(1, truncated=np.array([False, True, False]))
        info = {"final_obs": np.zeros((N, 3))}
        taken = (np.zeros((N, 2)), fields["reward"], fields["terminated"], fields["truncated"], info)
        with pytest.raises(rl.SchemaError, match=r"^final_obs: expected shape \(3, 2\)"):
            rollout.add_step(fields["obs"], fields["action"], taken)
        assert (rollout.data == before).all()
        assert rollout.num_stored == 1


class TestResetRows:
    def test_a_reset_row_ends_nothing_itself(self) -> None:
        rollout = make(6, count=0, autoreset="NEXT_STEP")
        ends = np.array([[1, 0, 1], [1, 0, 0], [1, 1, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]], bool)
        for t in range(6):
            rollout.add(**step(t, terminated=ends[t]))
        expected = [[1, 1, 1], [0, 1, 0], [1, 1, 1], [0, 0, 1], [1, 1, 1], [0, 0, 0]]
        assert rollout["mask"].long().tolist() == expected
        rollout.clear()
        rollout.add(**step(0))
        assert rollout["mask"].tolist() == [[True] * N]

    def test_only_the_truncated_rows_of_final_obs_are_read(self) -> None:
        rollout = make(count=0, obs=rl.Field(2, torch.uint8))
        final = np.full((N, 2), -1)
        final[1] = 7
        fields = step(0, obs=np.zeros((N, 2), np.uint8), truncated=np.array([False, True, False]))
        rollout.add(**fields, final_obs=final)
        assert rollout.final_obs.tolist() == [[7, 7]]


class TestRowsThatAllReset:
    """A NEXT_STEP rollout after a rollout whose last step ended every episode."""

    @staticmethod
    def reset_only(steps: int = 1) -> rl.RolloutBuffer:
        rollout = make(steps, count=0, autoreset="NEXT_STEP")
        for t in range(steps):
            rollout.add(**step(t, terminated=np.full(N, t == steps - 1)))
        rollout.clear()
        rollout.add(**step(0))
        return rollout

    @pytest.mark.parametrize("drop_last", [False, True])
    def test_a_rollout_of_reset_rows_has_no_transitions(self, backend: str, drop_last: bool) -> None:
        rollout = self.reset_only()
        assert rollout.is_full
        assert len(rollout) == 0
        rollout.compute_advantage(np.zeros(N))
        for shuffle in (False, True):
            options = {"drop_last": drop_last, "shuffle": shuffle, "epochs": 2}
            assert list(rollout.minibatches(4, **options)) == []
            assert list(rollout.minibatches(1, device="cpu", **options)) == []
            for length in (None, 1, 3):
                for layout in ("batch_first", "time_first", "packed"):
                    assert list(rollout.sequences(length, batch_size=2, layout=layout, **options)) == []
                    assert list(rollout.sequences(length, layout=layout, **options)) == []

    def test_out_stays_as_it_was(self) -> None:
        rollout = self.reset_only(2)
        rollout.add(**step(1))
        out = next(rollout.minibatches(N))
        before = out.clone()
        rollout.clear()
        rollout.add(**step(2, terminated=np.ones(N, bool)))
        rollout.clear()
        rollout.add(**step(2))
        assert list(rollout.minibatches(N, out=out)) == []
        assert (out == before).all()

    def test_an_empty_rollout_is_still_not_ready(self) -> None:
        rollout = self.reset_only()
        rollout.clear()
        for read in (lambda: rollout.minibatches(4), rollout.sequences):
            with pytest.raises(rl.NotReadyError, match="expected at least 1 stored step, got 0"):
                read()
