"""Pickles of the adapters' buffers: another version's are refused with a plain error."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from relive import CheckpointError
from relive.compat import agilerl, apexrl, embodichain, rl_buffer
from relive.compat.rsl_rl import RolloutStorage
from relive.errors import IncompatibleCheckpoint

MAKERS: dict[str, Any] = {
    "agilerl replay": lambda: agilerl.ReplayBuffer(8),
    "apexrl replay": lambda: apexrl.ReplayBuffer(8, (3,)),
    "embodichain": lambda: embodichain.RolloutBuffer(2, 4, 3, 1, "cpu"),
    "rl_buffer": lambda: rl_buffer.ReplayBuffer(4, 2, (3,), (1,), rl_buffer.StatsTracker(2)),
    "rsl_rl": lambda: RolloutStorage("rl", 2, 4, TensorDict({"policy": torch.zeros(2, 3)}, [2]), (1,)),
}
RENAMED_ENTRIES = {
    "agilerl replay": "core", "apexrl replay": "_core", "embodichain": "_rollout", "rl_buffer": "_core",
    "rsl_rl": "_rows",
}  # fmt: skip
"""One key of each pickled state, which another version may have under another name."""


@pytest.mark.parametrize("name", MAKERS)
def test_a_pickle_of_another_version_is_an_incompatible_checkpoint(name: str) -> None:
    buffer = MAKERS[name]()
    state = dict(buffer.__getstate__())
    state["other_name"] = state.pop(RENAMED_ENTRIES[name])
    with pytest.raises(IncompatibleCheckpoint, match="expected a pickle that this version of relive wrote, got one"):
        object.__new__(type(buffer)).__setstate__(state)


def test_pickled_steps_of_another_version_are_an_incompatible_checkpoint() -> None:
    rows: Any = apexrl.RolloutBuffer(2, 4, (3,), device="cpu")._rows
    restore, (settings, tensors, *rest) = rows.__reduce__()
    with pytest.raises(CheckpointError, match="lacks 'older_name'"):
        restore(settings, {"older_name": tensors["reward"]}, *rest)


def test_a_pickle_of_this_version_is_restored() -> None:
    for make in MAKERS.values():
        buffer = make()
        assert type(pickle.loads(pickle.dumps(buffer))) is type(buffer)


@pytest.mark.parametrize("name", MAKERS)
def test_derived_attributes_are_those_of_the_buffer(name: str) -> None:
    """A wrong name would pickle an attribute that is derived anyway."""
    buffer = MAKERS[name]()
    assert set(type(buffer)._derived_attributes) <= vars(buffer).keys()
