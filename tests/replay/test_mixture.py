"""Batches from several buffers: each buffer contributes exactly its share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import relive as rl


def fill(value: float, rows: int = 20, **options: Any) -> rl.ReplayBuffer:
    """Return a buffer of recognisable rows: the observation of row t is (value, t)."""
    replay = rl.ReplayBuffer(100, obs=2, action=(), seed=0, **options)
    for t in range(rows):
        replay.add([value, t], value, value, terminated=False, truncated=False, next_obs=[value, t + 1])
    return replay


@settings(deadline=None)
@given(
    ratios=st.lists(st.integers(0, 9) | st.floats(0, 1), min_size=1, max_size=4).filter(any),
    sizes=st.lists(st.integers(1, 17), min_size=1, max_size=12),
)
def test_every_batch_has_its_share_and_what_is_left_over_is_made_up_for(ratios: list[float], sizes: list[int]) -> None:
    mixture = rl.Mixture({str(i): fill(i, 3) for i in range(len(ratios))}, ratios)
    drawn = torch.zeros(len(ratios), dtype=torch.int64)
    shares, total = torch.tensor(ratios, dtype=torch.float64) / sum(ratios), 0
    for size in sizes:
        source = mixture.sample(size)["source"]
        assert len(source) == size
        assert source.tolist() == sorted(source.tolist())
        found = source.bincount(minlength=len(ratios))
        assert bool((found >= (shares * size - 1e-9).floor()).all()), "each batch has at least the whole part"
        drawn += found
        total += size
        assert float((drawn - shares * total).abs().max()) < max(len(ratios) - 1, 1) + 1e-9


def test_three_quarters_of_a_row_are_three_rows_in_four_batches() -> None:
    mixture = rl.Mixture({"online": fill(0), "demos": fill(1)}, {"demos": 1, "online": 3})
    # After 1 to 4 batches, 0.75, 1.5, 2.25 and 3 rows are due; the rounded sums are 1, 1 (the first buffer wins ties),
    # 2 and 3.
    assert [int(mixture.sample(3)["source"].sum()) for _ in range(8)] == [1, 0, 1, 1, 1, 0, 1, 1]
    assert mixture.names == ("online", "demos")


def test_rows_come_from_the_buffer_that_their_source_names() -> None:
    buffers = {"online": fill(0, sampler=rl.Prioritized()), "demos": fill(1), "old": fill(2)}
    mixture = rl.Mixture(buffers, (2, 1, 1))
    for view in (rl.Transition(), rl.NStep(3, 0.9), rl.Sequence(3)):
        batch = mixture.sample(16, view)
        assert batch["source"].tolist() == [0] * 8 + [1] * 4 + [2] * 4
        value = batch["obs"][..., 0].reshape(16, -1)[:, 0]
        assert torch.equal(value, batch["source"].float())
        assert bool((batch["weight"][8:] == 1).all())
        rows, own = batch["index"] // 3, list(buffers.values())
        for i in range(16):
            row = own[int(batch["source"][i])][int(rows[i])]
            assert torch.equal(row["obs"], batch["obs"][i].reshape(-1, 2)[0])


def test_without_priorities_there_are_no_weights() -> None:
    batch = rl.Mixture({"a": fill(0), "b": fill(1)}, (1, 1)).sample(4)
    assert "weight" not in batch.keys()
    assert set(batch.keys()) == {*fill(0).sample(1).keys(), "source"}


def test_priorities_find_their_way_back() -> None:
    sampler = rl.Prioritized(alpha=1.0, eps=0.0)
    online, demos = fill(0, sampler=sampler), fill(1, sampler=sampler)
    mixture = rl.Mixture({"online": online, "demos": demos, "rest": fill(2)}, (1, 1, 1))
    everything = torch.cat([online.ids() * 3, demos.ids() * 3 + 1])
    priority = torch.zeros(40)
    priority[[4, 20 + 7]] = 1.0
    assert mixture.update_priority(everything, priority) == 0
    batch = mixture.sample(30)
    assert set(batch["obs"][batch["source"] == 0, 1].tolist()) == {4.0}
    assert set(batch["obs"][batch["source"] == 1, 1].tolist()) == {7.0}
    # Rows of "rest", which has no priorities, are ignored.
    mixture.update_priority(batch["index"], torch.ones(30))
    for t in range(200):
        online.add([0, t], 0, 0, terminated=False, truncated=False, next_obs=[0, t + 1])
    assert mixture.update_priority(everything, torch.ones(40)) == 20


@pytest.mark.parametrize(
    ("index", "priority", "error", "says"),
    [
        ([0, 1], [1.0, -1.0], rl.PriorityError, r"priority\[1\]: expected a finite number"),
        ([0, 10_001], [2.0, 1.0], IndexError, "expected the id of a stored transition"),
        ([0, 1], [1.0], rl.SchemaError, r"priority: expected shape \(2,\), got \(1,\)"),
    ],
)
def test_a_wrong_update_changes_no_buffer(index: Any, priority: Any, error: type[Exception], says: str) -> None:
    buffers = {name: fill(0, sampler=rl.Prioritized()) for name in ("a", "b")}
    mixture = rl.Mixture(buffers, (1, 1))
    before = [buffer.sampler.state()["mass"].clone() for buffer in buffers.values()]
    with pytest.raises(error, match=says):
        mixture.update_priority(index, priority)
    for buffer, mass in zip(buffers.values(), before, strict=True):
        assert torch.equal(buffer.sampler.state()["mass"], mass)


def test_a_wrong_out_draws_nothing() -> None:
    def make() -> rl.Mixture:
        return rl.Mixture({"a": fill(0, sampler=rl.Prioritized()), "b": fill(1)}, (2, 1))

    mixture, twin = make(), make()
    for wrong in (make().sample(3), make().sample(4).exclude("source"), fill(0).sample(4)):
        with pytest.raises(rl.SchemaError, match="^out"):
            mixture.sample(4, out=wrong)
    for _ in range(3):
        assert bool((mixture.sample(4) == twin.sample(4)).all())


def test_a_batch_is_filled_or_moved_as_a_buffer_does_it() -> None:
    mixture = rl.Mixture({"a": fill(0), "b": fill(1)}, (1, 1))
    batch = mixture.sample(4)
    assert mixture.sample(4, out=batch) is batch
    assert mixture.sample(4, device="cpu")["obs"].device.type == "cpu"
    assert len(mixture) == 40
    assert repr(mixture) == "Mixture(a: 0.5, b: 0.5; 40 transitions)"


def test_a_buffer_of_ratio_zero_may_be_empty_and_another_may_not() -> None:
    mixture = rl.Mixture({"a": fill(0), "b": fill(1, 0)}, (1, 0))
    assert mixture.sample(5)["source"].tolist() == [0] * 5
    with pytest.raises(rl.NotReadyError, match="sample: b: expected at least 1 stored transition, got 0"):
        rl.Mixture({"a": fill(0), "b": fill(1, 0)}, (1, 1)).sample(4)


@pytest.mark.parametrize(
    "ratios", [(1,), (1, 2, 3), (0, 0), (1, -1), (1, float("nan")), {"a": 1}, {"a": 1, "c": 1}, (True, 1), ("1", 1)]
)
def test_ratios_are_one_number_for_each_buffer(ratios: Any) -> None:
    with pytest.raises(rl.SchemaError, match="ratios: expected numbers of at least 0 for a, b"):
        rl.Mixture({"a": fill(0), "b": fill(1)}, ratios)


def test_only_buffers_of_the_same_fields_can_be_mixed() -> None:
    other = rl.ReplayBuffer(10, obs=2, action=(), extra={"note": 1})
    with pytest.raises(rl.SchemaError, match=r"Mixture: b: expected the fields .* of a, got other fields \(note\)"):
        rl.Mixture({"a": fill(0), "b": other}, (1, 1))
    with pytest.raises(rl.SchemaError, match="Mixture: b: expected a ReplayBuffer, got DistillationBuffer"):
        rl.Mixture({"a": fill(0), "b": rl.DistillationBuffer(9, 2)}, (1, 1))  # pyright: ignore[reportArgumentType]
    same = fill(0)
    with pytest.raises(rl.SchemaError, match="Mixture: expected distinct buffers, got one buffer twice among a, b"):
        rl.Mixture({"a": same, "b": same}, (1, 1))


def test_the_steps_of_sequences_are_named_as_rows_are() -> None:
    buffers = {name: rl.ReplayBuffer(20, obs=1, action=(), seed=0) for name in ("a", "b")}
    for buffer in buffers.values():
        for t in range(5):
            buffer.add([float(t)], 0.0, 0.0, terminated=False, truncated=False, next_obs=[t + 1.0])
    batch = rl.Mixture(buffers, [1, 1]).sample(8, rl.Sequence(3, step_index=True))
    steps = batch["step_index"]
    assert torch.equal(steps[:, 0], batch["index"])
    assert torch.equal(steps >= 0, batch["mask"])
    assert bool(((steps % 2 == batch["source"].unsqueeze(1)) | (steps < 0)).all())


class TestWriting:
    def mixture(self, **second: Any) -> rl.Mixture:
        buffers = {
            "a": rl.ReplayBuffer(20, obs=1, action=(), extra={"x": rl.Mutable(2)}, seed=0),
            "b": rl.ReplayBuffer(20, obs=1, action=(), **{"extra": {"x": rl.Mutable(2)}, "seed": 1, **second}),
        }
        for buffer in buffers.values():
            for t in range(5):
                buffer.add([float(t)], 0.0, 0.0, terminated=False, truncated=False, next_obs=[t + 1.0], x=[0.0, 0.0])
        return rl.Mixture(buffers, [1, 1])

    def test_every_row_is_written_in_its_own_buffer(self) -> None:
        mixture = self.mixture()
        for view in (rl.Transition(), rl.Sequence(3, step_index=True)):
            batch = mixture.sample(8, view)
            index = batch["index"] if isinstance(view, rl.Transition) else batch["step_index"]
            assert mixture.write(index, x=torch.stack([index * 1.0, index * 2.0], -1)) == 0
            for source, buffer in enumerate(mixture.buffers.values()):
                own = index[(index >= 0) & (index % 2 == source)].unique()
                assert torch.equal(buffer[own // 2]["x"], torch.stack([own * 1.0, own * 2.0], -1))
        for t in range(5, 20):
            mixture.buffers["a"].add([float(t)], 0.0, 0.0, False, False, [t + 1.0], x=[0.0, 0.0])
        mixture.buffers["a"].clear()
        assert mixture.write(torch.tensor([0, 1, 2]), x=torch.ones(3, 2)) == 2

    def test_what_one_buffer_refuses_changes_no_other(self) -> None:
        for mixture, index, x, error in (
            (self.mixture(), [0, 3, 999], torch.ones(3, 2), IndexError),
            (self.mixture(), [0, 3, -1], torch.ones(3, 2), IndexError),
            (self.mixture(), [0, 3], torch.ones(2, 3), rl.SchemaError),
            (self.mixture(extra={"x": 2}), [0, 3], torch.ones(2, 2), rl.SchemaError),
        ):
            with pytest.raises(error):
                mixture.write(torch.tensor(index), x=x)
            assert not any(bool(buffer[buffer.ids()]["x"].any()) for buffer in mixture.buffers.values())
        assert self.mixture(extra={"x": 2}).write(torch.tensor([0, 2]), x=torch.ones(2, 2)) == 0


def test_a_mixture_issues_the_warnings_of_its_buffers() -> None:
    buffers = {}
    for name in ("a", "b"):
        buffers[name] = rl.ReplayBuffer(500, 1, (), seed=0)
        for t in range(65):
            buffers[name].add([10.0 * t], 0.0, 0.0, False, False, [10.0 * t + 1])
    buffers["b"].storage.warning = None
    mixed = rl.Mixture(buffers, [1, 1])
    with pytest.warns(rl.DataWarning, match="that do not"):
        mixed.sample(4)
    mixed.sample(4)
