"""What the buffers of all adapters have in common: seeds, copies, pickles, spawned processes and subclasses."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from relive import CheckpointError
from relive.compat import apexrl, embodichain
from relive.errors import IncompatibleCheckpoint
from tests.compat.drop_ins import DRAWN, DROP_INS, STEPS, WRITABLE, fill

COPIES = pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"]
)


def read_generators() -> str:
    """Return the states of the global generators."""
    return repr((torch.get_rng_state().tolist(), np.random.get_state()))  # noqa: NPY002


@pytest.mark.parametrize("name", DRAWN)
def test_the_same_seed_of_torch_gives_the_same_draws_in_one_process(name: str) -> None:
    drawn = []
    with torch.random.fork_rng():
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            before = read_generators()
            first = DROP_INS[name].draw(fill(name)).tolist()
            assert read_generators() == before
            torch.rand(1)
            drawn.append([first, DROP_INS[name].draw(fill(name)).tolist()])
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][0] != drawn[0][1]


@pytest.mark.parametrize("name", [name for name in DRAWN if DROP_INS[name].seeded])
def test_the_argument_seed_repeats_the_draws(name: str) -> None:
    drawn = []
    for seed in (1, 1, 2):
        buffer = fill(name, seed=seed)
        drawn.append([DROP_INS[name].draw(buffer).tolist() for _ in range(3)])
        torch.rand(1)
    assert drawn[0] == drawn[1] != drawn[2]


def test_every_epoch_of_a_rollout_has_another_order_unless_it_has_a_seed() -> None:
    flat = embodichain.transition_view(fill("embodichain").buffer, flatten=True)
    epochs = [next(embodichain.iterate_minibatches(flat, 16, "cpu"))["reward"].tolist() for _ in range(3)]
    assert len(set(map(tuple, epochs))) == 3
    for seed in (1, 1, 2):
        epochs.append(next(embodichain.iterate_minibatches(flat, 16, "cpu", seed=seed))["reward"].tolist())
    assert epochs[3] == epochs[4] != epochs[5]


@COPIES
@pytest.mark.parametrize(
    ("name", "steps"),
    [(name, steps) for name in WRITABLE for steps in (0, 2, 6) if steps <= STEPS or DROP_INS[name].wraps],
)
def test_a_copy_continues_with_the_same_steps_and_draws_in_memory_of_its_own(
    name: str, steps: int, copied: Any
) -> None:
    drop_in = DROP_INS[name]
    buffer = fill(name, steps)
    twin = copied(buffer)
    for number in range(steps, steps + (2 if steps else STEPS)):
        for each in (buffer, twin):
            drop_in.add(each, float(number))
    memory, own = (torch.as_tensor(drop_in.memory(each)) for each in (buffer, twin))
    assert torch.equal(memory, own)
    if name != "sb3, rollout" or buffer.full:
        for _ in range(3):
            assert torch.equal(drop_in.draw(buffer), drop_in.draw(twin))
    own.zero_()
    assert memory.any()
    assert not torch.as_tensor(drop_in.memory(twin)).any()


class Tagged:
    """Mixin whose constructor takes only a tag."""

    def __init__(self, tag: str) -> None:
        drop_in = next(each for each in DROP_INS.values() if each.kind is type(self).__mro__[2])
        super().__init__(*drop_in.arguments(), **dict(drop_in.options))
        self.tag = tag


KINDS = {each.kind: None for each in DROP_INS.values()}
TAGGED = [type(f"Tagged{i}", (Tagged, kind), {"__module__": __name__}) for i, kind in enumerate(KINDS)]
# Pickle finds classes by their names in the module.
globals().update({kind.__name__: kind for kind in TAGGED})


@COPIES
@pytest.mark.parametrize("kind", TAGGED, ids=[f"{kind.__module__.split('.')[2]}-{kind.__name__}" for kind in KINDS])
def test_a_copy_keeps_the_attributes_of_a_subclass(kind: Any, copied: Any) -> None:
    buffer = kind("mine")
    buffer.later = 7
    other = copied(buffer)
    assert (type(other), other.tag, other.later) == (kind, "mine", 7)


def add_one(buffers: dict[str, Any], answers: Any) -> None:
    """Add a step to each buffer, in the spawned process."""
    for name, buffer in buffers.items():
        DROP_INS[name].add(buffer, 3.0)
    answers.put({name: torch.as_tensor(DROP_INS[name].memory(buffer)).tolist() for name, buffer in buffers.items()})


def test_a_spawned_process_gets_a_copy_and_its_parent_keeps_the_buffer() -> None:
    buffers = {name: fill(name, 2) for name in WRITABLE}
    before = {name: torch.as_tensor(DROP_INS[name].memory(buffer)).clone() for name, buffer in buffers.items()}
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=add_one, args=(buffers, answers))
    process.start()
    received = answers.get(timeout=120)
    process.join(timeout=60)
    assert process.exitcode == 0
    for name, buffer in buffers.items():
        assert torch.equal(torch.as_tensor(DROP_INS[name].memory(buffer)), before[name]), name
        DROP_INS[name].add(buffer, 3.0)
        assert received[name] == torch.as_tensor(DROP_INS[name].memory(buffer)).tolist(), name


RENAMED_ENTRIES = {
    "agilerl": "core", "apexrl": "_core", "embodichain": "_rollout", "rl_buffer": "_core", "rsl_rl": "_rows",
}  # fmt: skip
"""One key of each pickled state, which another version may have under another name."""


@pytest.mark.parametrize("name", RENAMED_ENTRIES)
def test_a_pickle_of_another_version_is_an_incompatible_checkpoint(name: str) -> None:
    buffer = DROP_INS[name].make()
    state = dict(buffer.__getstate__())
    state["other_name"] = state.pop(RENAMED_ENTRIES[name])
    with pytest.raises(IncompatibleCheckpoint, match="expected a pickle that this version of relive wrote, got other"):
        object.__new__(type(buffer)).__setstate__(state)


def test_pickled_steps_of_another_version_are_an_incompatible_checkpoint() -> None:
    rows: Any = apexrl.RolloutBuffer(2, 4, (3,), device="cpu")._rows
    restore, (settings, tensors, *rest) = rows.__reduce__()
    with pytest.raises(CheckpointError, match="other contents .'older_name'"):
        restore(settings, {"older_name": tensors["reward"]}, *rest)
    with pytest.raises(CheckpointError, match="other contents .too many values"):
        restore(settings, rows.tensors, 0, set(), {})  # as before steps were packed
