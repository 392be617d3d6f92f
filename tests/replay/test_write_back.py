"""`write` overwrites mutable fields of the rows with the passed ids, and nothing else."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import relive as rl
from relive import kernels
from relive.rng import Randomness
from tests.conftest import BACKENDS
from tests.faults.digest import digest
from tests.tiers import select

ENVS, ROWS = 3, 6
EXTRA = {
    "latent": rl.Mutable(rl.Carry(2)),
    "parts": {"a": rl.Mutable(rl.Field((), torch.int16)), "b": 2, "c": rl.Mutable(rl.Field((), torch.bool))},
}
FALSE = np.zeros(ENVS, bool)


def made(memory: Any = "cpu", **options: Any) -> rl.ReplayBuffer:
    return rl.ReplayBuffer(
        ENVS * ROWS, 1, (), num_envs=ENVS, reward=rl.Mutable(()), extra=EXTRA, device=memory, seed=0, **options
    )


def step(replay: rl.ReplayBuffer, t: int, ends: np.ndarray = FALSE) -> None:
    """Add a recognisable step: every number is t·ENVS + environment."""
    number = t * ENVS + np.arange(ENVS)
    parts = {"a": number.astype(np.int16), "b": np.stack([number, number], 1), "c": number % 2 == 0}
    latent = np.stack([number, -number], 1)
    replay.add(number[:, None], number, number * 1.0, ends, FALSE, number[:, None] + ENVS, latent=latent, parts=parts)


def filled(count: int = 10, memory: Any = "cpu", **options: Any) -> rl.ReplayBuffer:
    replay = made(memory, **options)
    for t in range(count):
        step(replay, t)
    return replay


class TestWriting:
    def test_the_named_rows_are_written_and_no_other_row_or_field_is(self, memory: Any) -> None:
        replay = filled(memory=memory)
        ids = replay.ids()
        before = replay[ids].clone()
        chosen = ids[[2, 5, 7]]
        assert replay.write(chosen, latent=torch.arange(6.0).view(3, 2)) == 0
        after = replay[ids]
        before["latent"][[2, 5, 7]] = torch.arange(6.0).view(3, 2)
        assert (after == before).all()
        replay.check()

    def test_rows_that_were_overwritten_are_skipped_and_counted(self, memory: Any) -> None:
        replay = filled(memory=memory)
        ids = replay.ids()
        for t in range(10, 13):
            step(replay, t)
        left = replay.ids()
        before = replay[left].clone()
        stale = int((~torch.isin(ids, left)).sum())
        assert stale
        assert replay.write(ids, reward=torch.full((len(ids),), 7.0)) == stale
        after = replay[left]
        assert torch.equal(after["reward"] == 7, torch.isin(left, ids))
        assert torch.equal(after["latent"], before["latent"])

    def test_only_stale_rows_and_no_rows_change_nothing(self, memory: Any) -> None:
        replay = filled(memory=memory)
        before = digest(replay)
        assert replay.write([0, 1, 0], reward=[1.0, 2.0, 3.0]) == 3
        assert replay.write(torch.empty(0, dtype=torch.int64), reward=torch.empty(0)) == 0
        assert digest(replay) == before

    def test_the_mutable_leaves_of_a_nested_field_are_written_together(self, memory: Any) -> None:
        replay = filled(memory=memory)
        row = replay.ids()[:1]
        assert replay.write(row, parts={"a": [77], "c": [True]}, reward=[0.5]) == 0
        read = replay[row]
        assert (int(read["parts", "a"]), bool(read["parts", "c"]), float(read["reward"])) == (77, True, 0.5)
        assert read["parts", "b"].tolist() == [[float(row), float(row)]]

    def test_a_carried_field_is_written_at_every_step_and_read_at_the_start(self, memory: Any) -> None:
        replay = filled(memory=memory)
        batch = replay.sample(8, rl.Sequence(3, step_index=True))
        steps = batch["step_index"]
        assert torch.equal(steps >= 0, batch["mask"])
        new = torch.stack([steps * 1.0, steps * 2.0], -1)
        assert replay.write(steps, latent=new) == 0
        again = replay.read(batch["index"], rl.Sequence(3))
        assert torch.equal(again["latent"], torch.stack([batch["index"] * 1.0, batch["index"] * 2.0], -1))
        masked = steps[batch["mask"]]
        assert replay.write(masked, latent=-new[batch["mask"]]) == 0
        assert torch.equal(replay[masked]["latent"], -torch.stack([masked * 1.0, masked * 2.0], -1))

    def test_a_call_that_raises_has_written_nothing(self, memory: Any) -> None:
        replay = filled(memory=memory)
        row = int(replay.ids()[-1])
        before = digest(replay)
        wrong: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
            (IndexError, "the id of a stored transition", [row, 10**6], {"reward": [1.0, 2.0]}),
            (IndexError, "the id of a stored transition", [row, -1], {"reward": [1.0, 2.0]}),
            (IndexError, "the id of a stored transition", [[row, -2]], {"reward": [[1.0, 2.0]]}),
            (rl.SchemaError, "reward: expected shape", [row], {"reward": [[1.0]]}),
            (rl.SchemaError, "latent: expected shape", [row], {"reward": [1.0], "latent": [[1.0]]}),
            (rl.SchemaError, "parts.a: expected int16", [row], {"reward": [1.0], "parts": {"a": [0.5], "c": [True]}}),
            (rl.SchemaError, "parts: expected the keys", [row], {"parts": {"a": [1], "b": [[1, 2]], "c": [True]}}),
            (rl.SchemaError, "action: expected a Mutable field", [row], {"reward": [1.0], "action": [1.0]}),
            (rl.SchemaError, "obs: expected a Mutable field", [row], {"obs": [[1.0]]}),
            (rl.SchemaError, "write: expected at least one Mutable field", [row], {}),
            (rl.SchemaError, "value: expected a declared field", [row], {"value": [1.0]}),
            (rl.SchemaError, "index: expected a vector of int64", [0.5], {"reward": [1.0]}),
            (rl.SchemaError, "index: expected a vector of int64", row, {"reward": 1.0}),
        ]
        for error, text, index, fields in wrong:
            with pytest.raises(error, match=text):
                replay.write(index, **fields)
        assert digest(replay) == before


class TestOtherDevices:
    """Calls on the `meta` device, which raises an error if a call waits for a value."""

    SAMPLERS = (rl.Uniform(), rl.Recent(4), rl.NewFirst(0.5), rl.NewFirst(0.5, length=3), rl.Prioritized())

    @pytest.mark.parametrize("sampler", SAMPLERS)
    def test_rows_are_drawn_and_written_without_waiting(self, sampler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Randomness, "generator", lambda *_: None)
        extra = {"latent": rl.Mutable(3)}
        replay = rl.ReplayBuffer(64, 2, (), num_envs=4, extra=extra, device="meta", sampler=sampler)
        with torch.device("meta"):
            flags = torch.zeros(4, dtype=torch.bool)
            for _ in range(2):
                numbers = torch.zeros(4)
                obs, following = torch.zeros(4, 2), torch.zeros(4, 2)
                replay.add(obs, numbers, numbers, flags, flags, following, latent=torch.zeros(4, 3))
            batch = replay.sample(8, rl.Sequence(5, step_index=True))
            for index in (batch["step_index"], batch["index"]):
                stale: Any = replay.write(index, latent=torch.zeros(*index.shape, 3))
                assert stale.shape == ()
                assert stale.device.type == "meta"
                if isinstance(sampler, rl.Prioritized):
                    replay.update_priority(index, torch.zeros(index.shape))
            replay.cut()
            replay.clear()

    def test_rows_of_one_slot_are_alike_so_that_a_device_may_write_them_in_any_order(self) -> None:
        with kernels.force("torch"):
            replay = filled()
        row, other = replay.ids()[3:5].tolist()
        with Written() as written:
            replay.write([row, other, 0, row, 1, row], reward=torch.arange(6.0))
        ((slots, values),) = written.calls
        assert len(slots) == 6
        for slot in set(slots.tolist()):
            assert len(set(values[slots == slot].tolist())) == 1
        assert replay[[row, other]]["reward"].tolist() == [5.0, 1.0]


class Written(TorchDispatchMode):
    """Records the slots and values of all writes by index."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "index_put_" in str(func):
            self.calls.append((args[1][0], args[2].clone()))
        return func(*args, **(kwargs or {}))


class TestDeclaring:
    def test_an_observation_never_changes(self) -> None:
        with pytest.raises(rl.SchemaError, match=r"obs.a: expected an observation that never changes, got Mutable"):
            rl.ReplayBuffer(4, {"a": rl.Mutable(2), "b": 3}, ())

    def test_what_cannot_be_mutable_is_refused(self) -> None:
        for wrong in ({"a": 2}, rl.Stacked(rl.Field(2), 2), rl.Mutable(2)):
            with pytest.raises(rl.SchemaError, match="Mutable: expected one Field or Carry"):
                rl.Mutable(wrong)

    def test_a_rollout_and_a_distillation_buffer_have_no_mutable_fields(self) -> None:
        with pytest.raises(rl.SchemaError, match="x: expected a field that a rollout can store, got Mutable"):
            rl.RolloutBuffer(4, 2, 1, (), extra={"x": rl.Mutable(2)})
        with pytest.raises(rl.SchemaError, match="got Mutable"):
            rl.DistillationBuffer(4, 2, extra={"x": rl.Mutable(2)})

    def test_a_field_called_step_index_and_the_steps_ids_are_not_mixed_up(self) -> None:
        replay = rl.ReplayBuffer(4, 1, (), extra={"step_index": ()})
        replay.add([0.0], 0.0, 0.0, False, False, [1.0], step_index=5.0)
        assert replay.sample(1)["step_index"].item() == 5
        with pytest.raises(rl.SchemaError, match="step_index: expected no field called step_index"):
            replay.sample(1, rl.Sequence(2, step_index=True))


class TestKeeping:
    def test_a_checkpoint_has_what_was_written_back_since_the_last_one(self, memory: Any, tmp_path: Path) -> None:
        replay = filled(memory=memory)
        replay.save(tmp_path / "saved")
        ids = replay.ids()
        replay.write(ids, latent=torch.stack([ids * 3.0, ids * 5.0], -1))
        replay.save(tmp_path / "saved")
        again = rl.load(tmp_path / "saved", rl.ReplayBuffer)
        kept = again.ids()
        assert len(kept)
        assert torch.equal(again[kept]["latent"], torch.stack([kept * 3.0, kept * 5.0], -1))
        assert again.write(kept, reward=kept * 7.0) == 0
        assert torch.equal(again[kept]["reward"], kept * 7.0)
        again.check()

    def test_rows_are_saved_once_and_mutable_fields_each_time(self, tmp_path: Path) -> None:
        replay = filled()
        replay.save(tmp_path)
        segments = sorted(path.name for path in (tmp_path / "segments").iterdir())
        replay.write(replay.ids(), reward=torch.zeros(len(replay)))
        replay.save(tmp_path)
        assert sorted(path.name for path in (tmp_path / "segments").iterdir()) == segments

    def test_disk_memory_is_found_with_what_was_written_back(self, tmp_path: Path) -> None:
        replay = filled(memory=rl.Memory.disk(tmp_path / "memory"))
        ids = replay.ids()
        replay.write(ids, reward=-ids.float())
        replay.close()
        with rl.load(tmp_path / "memory", rl.ReplayBuffer) as again:
            assert torch.equal(again[ids]["reward"], -ids.float())
            again.check()

    def test_a_byte_that_the_disk_changes_is_found(self, tmp_path: Path) -> None:
        replay = filled(memory=rl.Memory.disk(tmp_path / "memory"))
        replay.write(replay.ids()[:3], reward=[1.0, 2.0, 3.0])
        slot = int(replay.storage.locate(replay.ids()[1:2]))
        column = np.memmap(tmp_path / "memory" / "column2", np.uint8, "r+")
        column[4 * slot] ^= 4
        with pytest.raises(rl.InvariantError, match="the bytes that were written"):
            replay.check()

    def test_a_saved_size_that_is_only_claimed_is_refused(self) -> None:
        replay, other = filled(), made()
        state = replay.state_dict()
        for wrong in (torch.zeros(2, ENVS), torch.zeros(ROWS + 1, ENVS, dtype=torch.float64)):
            before = digest(other)
            changed = {**state, "arrays": {**state["arrays"], "mutable.column2": wrong}}
            with pytest.raises(rl.SchemaError, match=r"mutable\.column2"):
                other.load_state_dict(changed)
            assert digest(other) == before


Operation = tuple[str, int, list[int]]
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "end", "cut", "clear", "write", "write", "save"]),
        st.integers(0, 100),
        st.lists(st.integers(0, 60), max_size=8),
    ),
    max_size=40,
)


@pytest.mark.parametrize("backend", select("native", of=BACKENDS))
@settings(max_examples=60, deadline=None)
@given(operations=OPERATIONS)
def test_writes_are_those_of_a_list_of_dicts(backend: str, operations: list[Operation]) -> None:
    if backend != "torch" and kernels.native_core() is None:
        pytest.skip("this install has no native core (no compiler)")
    with BACKENDS[backend]():
        replay = made()
        model: dict[int, float] = {}
        """The reward of every row that was ever issued."""
        for t, (name, value, places) in enumerate(operations):
            if name in ("step", "end"):
                step(replay, t, FALSE if name == "step" else np.ones(ENVS, bool))
                stored = replay[replay.ids()]
                new = dict(zip(stored["index"].tolist(), stored["action"].tolist(), strict=True))
                model |= {i: r for i, r in new.items() if i not in model}
            elif name == "cut":
                replay.cut()
            elif name == "clear":
                replay.clear()
            elif name == "save":
                replay = copy.deepcopy(replay)
            elif model:
                known = sorted(model)
                index = [known[-1 - place % len(known)] for place in places]
                alive = set(replay.ids().tolist())
                rewards = [float(value + i) for i in range(len(index))]
                got = replay.write(torch.tensor(index, dtype=torch.int64), reward=torch.tensor(rewards))
                assert got == sum(i not in alive for i in index)
                model |= {i: r for i, r in zip(index, rewards, strict=True) if i in alive}
            replay.check()
            stored = replay[replay.ids()]
            assert stored["reward"].tolist() == [model[i] for i in stored["index"].tolist()]


class Adding:
    """An array that adds rows to a buffer while it is converted."""

    def __init__(self, replay: rl.ReplayBuffer, values: Any, steps: int) -> None:
        self.replay, self.values, self.steps = replay, values, steps

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        for t in range(self.steps):
            step(self.replay, 100 + t)
        return np.asarray(self.values)


@pytest.mark.parametrize("steps", [1, ROWS, 3 * ROWS])
def test_values_that_add_rows_meanwhile_are_written_to_the_named_rows_only(memory: Any, steps: int) -> None:
    replay, expected = filled(10, memory), filled(10, "cpu")
    oldest = replay.ids()[:ENVS]
    gone = replay.write(oldest, reward=Adding(replay, np.full(ENVS, -7.0), steps))
    for t in range(steps):
        step(expected, 100 + t)
    is_there = torch.isin(oldest, expected.ids())
    assert gone == int((~is_there).sum())
    expected.write(oldest[is_there], reward=np.full(int(is_there.sum()), -7.0))
    assert torch.equal(replay.ids(), expected.ids())
    assert torch.equal(replay[replay.ids()]["reward"], expected[expected.ids()]["reward"])
    replay.check()


def test_names_and_priorities_that_add_rows_meanwhile_reach_the_named_rows_only() -> None:
    replay = filled(10, sampler=rl.Prioritized(alpha=1.0, eps=0.0))
    oldest = replay.ids()[:ENVS].clone()
    assert replay.write(Adding(replay, oldest, ROWS), reward=np.full(ENVS, -7.0)) == ENVS
    named = replay.ids()[:ENVS].clone()
    assert replay.update_priority(named, Adding(replay, np.full(ENVS, 9.0), ROWS)) == ENVS
    named = replay.ids()[:ENVS].clone()
    assert replay.update_priority(Adding(replay, named, ROWS), np.full(ENVS, 9.0)) == ENVS
    assert -7.0 not in replay[replay.ids()]["reward"]
    assert float(replay.state_dict()["arrays"]["sampler.mass"].max()) == 1.0
    replay.check()
