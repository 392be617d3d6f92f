"""The distillation buffer: rows against a deque, rounds, mixed actions, and refused arguments."""

from __future__ import annotations

import random
from collections import Counter, deque
from functools import partial
from itertools import chain
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import relive as rl
import relive.distillation
from tests.conftest import BACKENDS
from tests.faults.digest import digest
from tests.scripted import act, step_and_reset, vector


def make_buffer(count: int, capacity: int = 16, **options: Any) -> rl.DistillationBuffer:
    """Return a buffer of recognisable rows: obs = (t, -t), action = 10·t, with t the row."""
    buffer = rl.DistillationBuffer(capacity, **{"obs": 2, "action": (), "seed": 0, **options})
    for t in range(count):
        buffer.add([t, -t], 10.0 * t)
    return buffer


def rows(first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows `first` to `stop` − 1 of `make_buffer` as a batch."""
    t = torch.arange(first, stop, dtype=torch.float32)
    return torch.stack([t, -t], 1), 10 * t


def stored(buffer: rl.DistillationBuffer) -> list[tuple[int, int, float, float]]:
    """Return (index, round, first number of obs, action) of every row, oldest first."""
    batches = buffer.epochs(5, shuffle=False)
    return [
        (int(row["index"]), int(row["round"]), float(row["obs"][0]), float(row["action"]))
        for batch in batches
        for row in batch
    ]


def test_labels_given_in_inference_mode_do_not_bind_later_ones() -> None:
    buffer = rl.DistillationBuffer(10, obs=2)
    with torch.inference_mode():
        buffer.add(torch.zeros(3, 2), torch.zeros(3))
    buffer.add(torch.ones(3, 2), torch.ones(3))
    assert buffer[np.arange(6)]["action"].tolist() == [0, 0, 0, 1, 1, 1]


class TestAdding:
    @settings(max_examples=60, deadline=None)
    @given(
        capacity=st.integers(1, 9),
        sizes=st.lists(st.one_of(st.none(), st.integers(0, 20), st.sampled_from(["round", "clear"])), max_size=12),
        kernels=st.sampled_from(sorted(BACKENDS)),
    )
    def test_the_buffer_equals_a_deque_of_rows(self, capacity: int, sizes: list[Any], kernels: str) -> None:
        with BACKENDS[kernels]():
            buffer = rl.DistillationBuffer(capacity, obs=2, action=())
            expected: deque[tuple[int, int, float, float]] = deque(maxlen=capacity)
            row, round_ = 0, 0
            for size in sizes:
                buffer.check()
                if size == "round":
                    round_ += 1
                    assert buffer.next_round() == round_
                    continue
                if size == "clear":
                    buffer.clear()
                    expected.clear()
                    continue
                obs, action = rows(row, row + (1 if size is None else size))
                buffer.add(*((obs[0], action[0]) if size is None else (obs, action)))
                expected.extend((t, round_, float(t), 10.0 * t) for t in range(row, row + len(obs)))
                row += len(obs)
            buffer.check()
            assert len(buffer) == len(expected)
            assert buffer.is_full == (len(expected) == capacity)
            assert buffer.round == round_
            assert (stored(buffer) if expected else []) == list(expected)

    def test_nested_observations_actions_and_what_else_the_teacher_says(self, backend: str) -> None:
        obs = {"camera": rl.Field((2, 2), torch.uint8), "body": {"joints": 3, "mode": rl.Field((), torch.int64)}}
        buffer = rl.DistillationBuffer(
            5, obs, {"arm": 2, "grip": gym.spaces.Discrete(3)}, extra={"mean": {"arm": 2}, "logits": 3}
        )

        def observe(t: np.ndarray) -> dict[str, Any]:
            body = {"joints": np.repeat(t[..., None], 3, -1).astype(np.float64), "mode": t}
            return {"camera": np.tile(t[..., None, None], (2, 2)).astype(np.uint8), "body": body}

        for t in (np.array(0), np.array([1, 2, 3]), np.array(4), np.array([5, 6])):
            wide = np.repeat(t[..., None], 2, -1) / 2
            buffer.add(
                observe(t),
                {"arm": wide, "grip": t % 3},
                mean={"arm": -wide},
                logits=np.repeat(t[..., None], 3, -1) / 4,
            )
        batch = buffer.sample(200)
        t = batch["index"]
        assert set(t.tolist()) == {2, 3, 4, 5, 6}
        assert torch.equal(batch["obs", "body", "mode"], t)
        assert torch.equal(batch["obs", "body", "joints"][:, 2], t.float())
        assert torch.equal(batch["obs", "camera"][:, 1, 0], t.to(torch.uint8))
        assert torch.equal(batch["action", "arm"][:, 1], t / 2)
        assert torch.equal(batch["action", "grip"], t % 3)
        assert torch.equal(batch["mean", "arm"], -batch["action", "arm"])
        assert torch.equal(batch["logits"][:, 0], t / 4)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint16, torch.uint32, torch.bool, torch.int8])
    def test_fields_of_any_dtype(self, dtype: torch.dtype, backend: str) -> None:
        buffer = rl.DistillationBuffer(4, obs=rl.Field(2, dtype), action=rl.Field((), dtype))
        ones = torch.ones(3, 2).to(dtype)
        buffer.add(ones, ones[:, 0])
        assert torch.equal(buffer[[0, 2]]["obs"], ones[:2])
        buffer.mix(ones[:, 0], ones[:, 1], 0.5)

    def test_inputs_and_batches_are_copies(self, backend: str) -> None:
        obs, action = (x.numpy() for x in rows(0, 4))
        buffer = rl.DistillationBuffer(8, obs=2)
        buffer.add(obs, action)
        obs[:], action[:] = 99, 99
        for batch in chain([buffer.sample(200)], buffer.epochs(4, epochs=2, shuffle=False), [buffer[torch.arange(4)]]):
            assert set(batch["index"].tolist()) == {0, 1, 2, 3}
            for name in ("obs", "action", "index", "round"):
                batch[name].fill_(77)
        ids = torch.arange(4)
        buffer[ids]["index"].fill_(77)
        assert ids.tolist() == [0, 1, 2, 3]
        assert stored(buffer) == [(t, 0, float(t), 10.0 * t) for t in range(4)]

    def test_gradients_are_not_stored(self) -> None:
        buffer = rl.DistillationBuffer(8, obs=2)
        obs, action = rows(0, 3)
        buffer.add(obs, action.requires_grad_())
        assert not buffer.sample(2)["action"].requires_grad

    def test_a_declared_buffer_allocates_at_construction_and_reports_its_bytes(self) -> None:
        assert rl.DistillationBuffer(10, obs=3, action=(), extra={"logits": 2}).nbytes == 10 * (3 + 1 + 2) * 4
        with pytest.raises(MemoryError, match="capacity: expected at most"):
            rl.DistillationBuffer(10**10, obs=1000, action=())


class TestInferring:
    @pytest.mark.parametrize(
        ("action", "shape", "dtype"),
        [
            (np.zeros((3, 2)), (2,), torch.float32),
            (np.zeros((3, 2), np.float32), (2,), torch.float32),
            (torch.zeros(3, dtype=torch.float16), (), torch.float16),
            (np.arange(3), (), torch.int64),
            (np.arange(3, dtype=np.uint8), (), torch.uint8),
            ([True, False, True], (), torch.bool),
        ],
    )
    def test_the_first_add_declares_shape_and_dtype(
        self, action: Any, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        buffer = rl.DistillationBuffer(8, obs=2)
        assert buffer.nbytes == 0
        buffer.add(rows(0, 3)[0], action)
        assert buffer.sample(5)["action"].shape == (5, *shape)
        assert buffer.sample(5)["action"].dtype == dtype
        assert buffer.nbytes == 8 * (8 + int(np.prod(shape)) * dtype.itemsize)

    def test_a_single_row_is_enough_to_infer_fields(self) -> None:
        buffer = rl.DistillationBuffer(8, obs=2)
        buffer.add([0, 0], [1.0, 2.0, 3.0], logits=[0.5], done=True)
        buffer.add(rows(1, 3)[0], torch.ones(2, 3), logits=torch.ones(2, 1), done=[True, False])
        batch = buffer.sample(4)
        assert batch["action"].shape == (4, 3)
        assert batch["logits"].dtype == torch.float32
        assert batch["done"].dtype == torch.bool

    def test_nested_actions_are_inferred_too(self) -> None:
        obs = rows(0, 3)[0]
        buffer = rl.DistillationBuffer(8, obs=2, extra={"weight": ()})
        action = {"arm": torch.ones(3, 2), "legs": (torch.zeros(3), torch.arange(3))}
        legs = dict(zip("01", action["legs"], strict=True))
        buffer.add(obs, TensorDict({"arm": action["arm"], "legs": legs}, [3]), weight=torch.arange(3.0))
        buffer.add(obs, action, weight=torch.arange(3.0))
        assert buffer[[0, 4]]["action", "legs", "1"].tolist() == [0, 1]
        assert buffer[4]["weight"] == 1.0

    def test_inferred_fields_are_fixed_after_the_first_add(self) -> None:
        buffer = rl.DistillationBuffer(8, obs=2)
        buffer.add([0, 0], 3, mean=[0.0])
        obs = rows(0, 3)[0]
        before = digest(buffer)
        for action, extra, message in [
            (np.zeros(3), {"mean": np.zeros((3, 1))}, "action: expected int64, got float64"),
            (np.zeros((3, 1), int), {"mean": np.zeros((3, 1))}, r"action: expected shape \(3,\) for 3 rows"),
            (np.arange(3), {}, "mean: expected a value, got None"),
            (np.arange(3), {"mean": np.zeros((3, 1)), "std": np.zeros(3)}, "std: expected a declared field"),
        ]:  # fmt: skip
            with pytest.raises(rl.SchemaError, match=message):
                buffer.add(obs, action, **extra)
            assert digest(buffer) == before
        buffer.clear()
        with pytest.raises(rl.SchemaError, match="action: expected int64"):
            buffer.add(obs, np.zeros(3), mean=np.zeros((3, 1)))

    def test_a_failed_first_add_declares_no_fields(self) -> None:
        buffer = rl.DistillationBuffer(8, obs=2, extra={"logits": 4})
        before, obs = digest(buffer), rows(0, 3)[0]
        for action, extra, message in [
            (np.zeros((2, 5)), {"logits": np.zeros((3, 4))}, r"action: expected shape \(3, 5\) for 3 rows"),
            (1.0, {"logits": np.zeros((3, 4))}, r"action: expected shape \(3,\) for 3 rows, got \(\)"),
            (None, {"logits": np.zeros((3, 4))}, "action: expected a value, got None"),
            (np.zeros(3), {}, "logits: expected a value, got None"),
            (np.zeros(3), {"logits": np.zeros((3, 4)), "index": 1},
             "extra: expected other names than .* reserved, got 'index'"),
            ("left", {"logits": np.zeros((3, 4))}, "action: expected numbers or bools"),
        ]:  # fmt: skip
            with pytest.raises(rl.SchemaError, match=message):
                buffer.add(obs, action, **extra)
            assert digest(buffer) == before
        buffer.add(obs, np.zeros((3, 2)), logits=np.zeros((3, 4)))
        assert len(buffer) == 3

    def test_with_a_declared_action_every_field_must_be_declared(self) -> None:
        with pytest.raises(rl.SchemaError, match="mean: expected a declared field"):
            make_buffer(0).add([0, 0], 1.0, mean=0.0)


class TestRefusing:
    @pytest.mark.parametrize(
        ("obs", "action", "message"),
        [
            (None, 1.0, "obs: expected a value, got None. Pass one row or a batch of rows."),
            (1.0, 1.0, r"obs: expected shape \(2,\), or \('rows', 2\) for a batch, got \(\)"),
            (np.zeros((1, 3, 2)), np.zeros(3), r"obs: expected shape .* got \(1, 3, 2\). Pass one row or a batch"),
            (np.zeros(3), 1.0, r"obs: expected shape \(2,\), got \(3,\)"),
            (np.zeros((3, 4)), np.zeros(3), r"obs: expected shape \(3, 2\) for 3 rows, got \(3, 4\)"),
            (np.zeros((3, 2)), 1.0, r"action: expected .* got \(\). Pass a row for each of the rows"),
            (np.zeros((3, 2)), np.zeros((3, 1)), "action: expected .* Squeeze the last axis."),
            (np.zeros((3, 2)), np.zeros(2), r"action: expected shape \(3,\) for 3 rows, got \(2,\)"),
            ([[0.0, 1.0], [2.0]], np.zeros(2), "obs: expected an array, got list"),
            (torch.zeros(3, 2, device="meta"), np.zeros(3), "obs: expected a tensor on cpu, got meta"),
            (np.zeros((3, 2)), np.zeros(3, complex), "action: expected float32, got complex128"),
        ],
    )
    def test_wrong_shapes_and_dtypes_are_refused_and_nothing_changes(self, obs: Any, action: Any, message: str) -> None:
        buffer = make_buffer(5)
        before = digest(buffer)
        with pytest.raises(rl.SchemaError, match=message):
            buffer.add(obs, action)
        assert digest(buffer) == before


class TestSampling:
    @pytest.mark.parametrize("count", [7, 16, 41])
    def test_every_stored_row_is_as_likely_as_any_other(self, count: int, backend: str) -> None:
        buffer, draws = make_buffer(count), 16_000
        batch = buffer.sample(draws)
        assert torch.equal(batch["obs"][:, 0], batch["index"].float())
        assert torch.equal(batch["action"], 10.0 * batch["index"])
        counts = Counter(batch["index"].tolist())
        assert set(counts) == set(range(max(0, count - 16), count))
        expected = draws / len(buffer)
        chi_squared = sum((n - expected) ** 2 / expected for n in counts.values())
        # With 15 degrees of freedom a larger χ² has a probability below 0.0005.
        assert chi_squared < 40

    def test_an_empty_buffer_cannot_be_sampled(self) -> None:
        for buffer in (make_buffer(0), rl.DistillationBuffer(4, obs=2), make_buffer(3)):
            buffer.clear()
            for read in (lambda b: b.sample(3), lambda b: b.epochs(3), lambda b: b.sample(1, out=TensorDict())):
                with pytest.raises(rl.NotReadyError, match="expected at least 1 stored row, got 0. Add rows first."):
                    read(buffer)

    def test_the_seed_decides_the_draws_and_global_generators_are_unchanged(self, backend: str) -> None:
        torch.manual_seed(0)
        random.seed(0)
        others = torch.get_rng_state().tolist(), random.getstate()
        first, second = (make_buffer(9, seed=5) for _ in range(2))
        for _ in range(3):
            assert torch.equal(first.sample(20)["index"], second.sample(20)["index"])
            assert torch.equal(*(torch.cat([x["index"] for x in b.epochs(2)]) for b in (first, second)))
        assert not torch.equal(
            make_buffer(9, seed=None).sample(20)["index"], make_buffer(9, seed=None).sample(20)["index"]
        )
        assert (torch.get_rng_state().tolist(), random.getstate()) == others

    def test_sizes_are_checked_at_the_call(self) -> None:
        with pytest.raises(rl.SchemaError, match="expected a positive int, got 0"):
            make_buffer(3).sample(0)
        with pytest.raises(rl.SchemaError, match="batch_size: expected a positive int, got 0"):
            make_buffer(3).epochs(0)
        with pytest.raises(rl.SchemaError, match="epochs: expected a positive int, got 0"):
            make_buffer(3).epochs(2, epochs=0)

    def test_out_is_filled_and_returned(self, backend: str) -> None:
        buffer, same = (rl.DistillationBuffer(16, obs=2, action=(), seed=3) for _ in range(2))
        for one in (buffer, same):
            one.add(*rows(0, 12))
            one.next_round()
            one.add(*rows(12, 20))
        out = buffer.sample(8)
        same.sample(8)
        assert buffer.sample(8, out=out) is out
        expected = same.sample(8)
        assert all(torch.equal(out[name], expected[name]) for name in ("obs", "action", "index", "round"))
        indices = [batch["index"].clone() for batch in buffer.epochs(8, out=out, epochs=2)]
        assert [set(torch.cat(indices[i : i + 2]).tolist()) for i in (0, 2)] == [set(range(4, 20))] * 2

    def test_an_out_in_the_memory_of_the_buffer_is_refused_before_anything_is_drawn(self, backend: str) -> None:
        buffer = make_buffer(10)
        out = buffer.sample(4)
        out["obs"] = buffer.state_dict()["rows"]["column0"].squeeze(1)[2:6]
        before = digest(buffer)
        for read in (buffer.sample, partial(buffer.epochs, drop_last=True)):
            with pytest.raises(rl.SchemaError, match=r"out\.obs: expected memory outside the buffer"):
                list(read(4, out=out))
        assert digest(buffer) == before

    def test_an_out_that_does_not_fit_is_refused_before_anything_is_drawn(self) -> None:
        buffer = make_buffer(10)
        out = buffer.sample(4)
        before = digest(buffer)
        with pytest.raises(rl.SchemaError, match=r"out.obs: expected contiguous torch.float32 of shape \(5, 2\)"):
            buffer.sample(5, out=out)
        with pytest.raises(rl.SchemaError, match="out: expected the fields"):
            buffer.sample(4, out=TensorDict({"obs": out["obs"]}, [4]))
        with pytest.raises(
            rl.SchemaError, match="out: expected full batches of 4 rows, got 10 rows. Pass drop_last=True"
        ):
            buffer.epochs(4, out=out)
        with pytest.raises(rl.SchemaError, match="out: expected no device= together with out="):
            buffer.sample(4, out=out, device="cpu")
        assert digest(buffer) == before

    def test_a_batch_is_copied_to_another_device(self) -> None:
        buffer = make_buffer(10)
        assert buffer.sample(4, device="meta")["obs"].device.type == "meta"
        assert next(buffer.epochs(4, device="meta"))["obs"].device.type == "meta"


class TestEpochs:
    def test_an_epoch_has_every_row_once_in_a_new_order(self, backend: str) -> None:
        buffer = make_buffer(23)
        batches = list(buffer.epochs(5, epochs=3))
        assert [len(batch) for batch in batches] == [5, 5, 5, 1] * 3
        orders = [torch.cat([b["index"] for b in batches[i : i + 4]]).tolist() for i in (0, 4, 8)]
        assert all(sorted(order) == list(range(7, 23)) for order in orders)
        assert len({tuple(order) for order in orders}) == 3
        assert all(torch.equal(batch["action"], 10.0 * batch["index"]) for batch in batches)

    def test_drop_last_omits_an_incomplete_batch(self) -> None:
        buffer = make_buffer(13)
        assert [len(batch) for batch in buffer.epochs(5, epochs=2, drop_last=True)] == [5, 5] * 2
        seen = {int(i) for batch in buffer.epochs(5, epochs=40, drop_last=True) for i in batch["index"]}
        assert seen == set(range(13))
        with pytest.raises(rl.NotReadyError, match="epochs: expected 14 rows, got 13"):
            buffer.epochs(14, drop_last=True)

    def test_reading_rows_overwritten_during_an_epoch_is_an_error(self) -> None:
        buffer = make_buffer(14)
        batches = buffer.epochs(4)
        next(batches)
        buffer.add(*rows(14, 16))
        # All fourteen rows are still stored.
        assert len(next(batches)) == 4
        buffer.add([16, -16], 160.0)
        with pytest.raises(
            rl.NotReadyError,
            match=r"epochs: expected row 0, the oldest of these epochs, to be stored, got rows from \d+",
        ):
            next(batches)
        batches = buffer.epochs(4)
        buffer.clear()
        with pytest.raises(rl.NotReadyError, match="Finish the epochs"):
            next(batches)


class TestRowsById:
    def test_an_id_names_the_same_row_until_it_is_overwritten(self) -> None:
        buffer = make_buffer(20)
        assert buffer[[4, 19, 4]]["action"].tolist() == [40.0, 190.0, 40.0]
        assert buffer[np.int64(7)]["obs"].tolist() == [7.0, -7.0]
        for wrong in (3, 20, -1):
            with pytest.raises(IndexError, match=rf"index: expected stored rows \(4 to 19\), got {wrong}"):
                buffer[wrong]
        buffer.clear()
        with pytest.raises(IndexError, match="index"):
            buffer[19]
        buffer.add([0.0, 0.0], 5.0)
        assert buffer[20]["action"] == 5.0

    def test_an_index_is_int64_in_one_axis(self) -> None:
        for wrong in (1.5, [1.5], [[1]], True):
            with pytest.raises(rl.SchemaError, match="index: expected a vector of int64"):
                make_buffer(3)[wrong]


def three_rounds(**options: Any) -> rl.DistillationBuffer:
    """Return a buffer with rows 0 to 3 in round 0, 4 and 5 in round 1, 6 to 11 in round 2."""
    buffer = rl.DistillationBuffer(16, obs=2, action=(), seed=0, **options)
    buffer.add(*rows(0, 4))
    buffer.next_round()
    buffer.add(*rows(4, 6))
    buffer.next_round()
    buffer.add(*rows(6, 12))
    return buffer


class TestRounds:
    def test_each_row_has_the_number_of_its_round(self, backend: str) -> None:
        buffer = three_rounds()
        batch = buffer[torch.arange(12)]
        assert batch["round"].tolist() == [0] * 4 + [1] * 2 + [2] * 6
        assert buffer.sample(9)["round"].dtype == torch.int64
        # These rows overwrite round 0 and half of round 1.
        buffer.add(*rows(12, 21))
        assert {(i, r) for i, r, _, _ in stored(buffer)} == {(5, 1), *((i, 2) for i in range(6, 21))}
        buffer.clear()
        assert buffer.round == 2
        buffer.add([0, 0], 0.0)
        assert buffer[21]["round"] == 2

    def test_a_round_may_have_no_rows(self) -> None:
        buffer = make_buffer(3)
        buffer.next_round()
        buffer.next_round()
        buffer.add([3, -3], 30.0)
        assert buffer[[2, 3]]["round"].tolist() == [0, 2]
        assert set(buffer.sample(50, recent=2)["index"].tolist()) == {3}

    @pytest.mark.parametrize(("recent", "oldest"), [(1, 6), (2, 4), (3, 0), (9, 0), (None, 0)])
    def test_recent_draws_from_the_newest_rounds_only(self, recent: int | None, oldest: int, backend: str) -> None:
        buffer, expected = three_rounds(), range(oldest, 12)
        counts = Counter(buffer.sample(6000, recent=recent)["index"].tolist())
        assert set(counts) == set(expected)
        mean = 6000 / len(expected)
        # A χ² of 36 is improbable with at most 11 degrees of freedom.
        assert sum((n - mean) ** 2 / mean for n in counts.values()) < 36
        epoch = torch.cat([batch["index"] for batch in buffer.epochs(5, recent=recent)])
        assert sorted(epoch.tolist()) == list(expected)

    def test_recent_draws_a_share_from_the_newest_rounds_and_the_rest_from_all(self, backend: str) -> None:
        index = three_rounds().sample(40_000, recent={1: 0.5, 2: 0.2})["index"]
        share = torch.bincount(index, minlength=12) / len(index)
        expected = torch.full((12,), 0.3 / 12)
        expected[4:] += 0.2 / 8
        expected[6:] += 0.5 / 6
        torch.testing.assert_close(share, expected, atol=0.005, rtol=0)

    def test_shares_of_one_leave_nothing_for_the_rest(self) -> None:
        index = three_rounds().sample(5000, recent={1: 0.9, 2: 0.1})["index"]
        assert set(index.tolist()) == set(range(4, 12))

    def test_recent_counts_only_stored_rows_of_a_round_larger_than_the_ring(self) -> None:
        buffer = three_rounds()
        buffer.add(*rows(12, 30))
        assert set(buffer.sample(900, recent=1)["index"].tolist()) == set(range(14, 30))

    @pytest.mark.parametrize(
        ("recent", "message"),
        [
            (0, "recent: expected a positive int, got 0"),
            (0.5, "recent: expected a positive int, got 0.5"),
            (True, "recent: expected a positive int, got True"),
            ({1: 1.5}, r"recent: expected a number from 0 to 1, got 1.5"),
            ({1: float("nan")}, r"recent: expected a number from 0 to 1, got nan"),
            ({0: 0.5}, "recent: expected a positive int, got 0"),
            ({1: 0.7, 2: 0.5}, "recent: expected shares that add up to at most 1, got 1.2"),
        ],
    )
    def test_wrong_rounds_and_shares_are_refused(self, recent: Any, message: str) -> None:
        buffer = three_rounds()
        before = digest(buffer)
        with pytest.raises(rl.SchemaError, match=message):
            buffer.sample(3, recent=recent)
        assert digest(buffer) == before

    def test_a_round_without_rows_cannot_be_drawn_from(self) -> None:
        buffer = three_rounds()
        buffer.next_round()
        for read in (lambda: buffer.sample(3, recent=1), lambda: buffer.sample(3, recent={1: 0.5}),
                     lambda: buffer.epochs(3, recent=1)):  # fmt: skip
            with pytest.raises(rl.NotReadyError, match="expected at least 1 row in the newest 1 rounds, got 0"):
                read()
        assert len(buffer.sample(3, recent=2)) == 3


class TestMixing:
    @pytest.mark.parametrize("beta", [0.0, 0.25, 1.0])
    def test_the_teacher_acts_in_its_share_of_the_environments(self, beta: float, backend: str) -> None:
        buffer = rl.DistillationBuffer(4, obs=2, action=3, seed=1)
        teacher, student = torch.arange(60_000.0).view(-1, 3), -torch.arange(60_000.0).view(-1, 3) - 1
        action = buffer.mix(teacher, student, beta)
        first = (action == teacher).all(1)
        assert torch.equal(action, torch.where(first.unsqueeze(1), teacher, student))
        assert abs(float(first.float().mean()) - beta) < (0.01 if 0 < beta < 1 else 1e-9)

    def test_golden(self, backend: str) -> None:
        buffer = rl.DistillationBuffer(4, obs=2, action=(), seed=0)
        first = np.random.Generator(np.random.PCG64DXSM(0)).random(10) < 0.5
        action = buffer.mix(torch.ones(10), torch.zeros(10), 0.5)
        assert action.bool().tolist() == first.tolist()
        assert 0 < first.sum() < 10

    def test_beta_may_be_a_function_of_the_round(self) -> None:
        buffer = rl.DistillationBuffer(4, obs=2, action=(), seed=0)
        teacher, student = np.ones(20_000), np.zeros(20_000)
        for round_ in range(4):
            share = float(buffer.mix(teacher, student, lambda i: 0.5**i).mean())
            assert abs(share - 0.5**round_) < 0.02
            buffer.next_round()

    def test_a_nested_action_comes_completely_from_teacher_or_student(self, backend: str) -> None:
        buffer = rl.DistillationBuffer(4, obs=2, action={"arm": (2, 2), "grip": gym.spaces.Discrete(9)}, seed=0)
        teacher = {"arm": np.ones((500, 2, 2)), "grip": np.full(500, 1)}
        student = {"arm": np.zeros((500, 2, 2)), "grip": np.full(500, 0)}
        action = buffer.mix(teacher, student, 0.5)
        assert action.batch_size == (500,)
        assert torch.equal(action["arm"], action["grip"].float().view(-1, 1, 1).expand(500, 2, 2))
        assert 0 < action["grip"].sum() < 500

    def test_mix_draws_one_actor_for_a_single_environment(self) -> None:
        buffer = rl.DistillationBuffer(4, obs=2, action=3, seed=0)
        actions = [buffer.mix([1.0] * 3, [0.0] * 3, 0.5) for _ in range(200)]
        assert all(action.shape == (3,) for action in actions)
        assert {tuple(action.tolist()) for action in actions} == {(1.0,) * 3, (0.0,) * 3}
        discrete = rl.DistillationBuffer(4, obs=2, action=gym.spaces.Discrete(4))
        assert discrete.mix(3, 2, 1).shape == ()
        assert int(discrete.mix(3, 2, 1)) == 3

    def test_changing_a_mixed_action_does_not_change_the_teachers_action(self) -> None:
        buffer, teacher = rl.DistillationBuffer(4, obs=2, action=3), torch.ones(2, 3)
        buffer.mix(teacher, torch.zeros(2, 3), 1.0).fill_(9)
        assert (teacher == 1).all()

    def test_mix_needs_a_declared_or_stored_action(self) -> None:
        buffer = rl.DistillationBuffer(4, obs=2)
        with pytest.raises(
            rl.NotReadyError, match=r"mix: expected a declared action, got the fields \('obs',\). Declare action="
        ):
            buffer.mix(1.0, 2.0, 0.5)
        buffer.add([0, 0], 1.0)
        assert float(buffer.mix(1.0, 2.0, 0)) == 2.0

    @pytest.mark.parametrize(
        ("teacher", "student", "beta", "message"),
        [
            (np.zeros((4, 3)), np.zeros((4, 3)), 1.5, r"beta: expected a number from 0 to 1, got 1.5"),
            (np.zeros((4, 3)), np.zeros((4, 3)), lambda i: -1.0, r"beta: expected a number from 0 to 1, got -1.0"),
            (np.zeros((4, 3)), np.zeros((4, 3)), True, "beta: expected a number"),
            (np.zeros((4, 3)), np.zeros((5, 3)), 0.5, r"student_action: expected shape \(4, 3\) for 4 rows"),
            (np.zeros((4, 3)), np.zeros(3), 0.5, r"student_action: expected shape \(4, 3\) for 4 rows"),
            (np.zeros((4, 2)), np.zeros((4, 3)), 0.5, r"teacher_action: expected shape \(4, 3\) for 4 rows"),
            (None, np.zeros((4, 3)), 0.5, "teacher_action: expected a value"),
            (1.0, 1.0, 0.5, r"teacher_action: expected shape \(3,\), or \('rows', 3\) for a batch, got \(\)"),
        ],
    )
    def test_mix_refuses_wrong_actions_before_it_draws(
        self, teacher: Any, student: Any, beta: Any, message: str
    ) -> None:
        buffer = rl.DistillationBuffer(4, obs=2, action=3, seed=0)
        before = digest(buffer)
        with pytest.raises(rl.SchemaError, match=message):
            buffer.mix(teacher, student, beta)
        assert digest(buffer) == before


def make_replay(steps: int = 40, num_envs: int = 3, **options: Any) -> tuple[rl.ReplayBuffer, list[list[float]]]:
    """Return a replay buffer of scripted environments, and its valid observations in row order."""
    env = vector([((3, "terminated"), (5, "truncated"))] * num_envs, AutoresetMode.NEXT_STEP)
    replay = rl.ReplayBuffer.for_env(env, 20 * num_envs, **options)
    obs, _ = env.reset()
    for _ in range(steps):
        action = act(obs)
        step, following = step_and_reset(env, action)
        replay.add_step(obs.copy(), action, step)
        obs = following
    index = torch.cat([episode["index"] for episode in replay.episodes()])
    seen = torch.cat([episode["obs"] for episode in replay.episodes()])
    return replay, seen[index.argsort()].tolist()


class TestFilling:
    @pytest.mark.parametrize("batch_size", [1, 7, 1000])
    def test_every_valid_transition_of_a_replay_buffer_in_row_order(self, batch_size: int, backend: str) -> None:
        replay, seen = make_replay()
        assert len(seen) == len(replay) < 60
        buffer = rl.DistillationBuffer(100, obs=3)
        buffer.fill(replay, batch_size=batch_size)
        batch = buffer[torch.arange(len(seen))]
        assert len(buffer) == len(seen)
        assert batch["obs"].tolist() == seen
        assert torch.equal(batch["action"], torch.as_tensor(act(batch["obs"].numpy())))

    def test_a_teacher_says_what_is_to_be_done_and_what_else(self) -> None:
        replay, seen = make_replay()
        asked: list[int] = []

        def teacher(obs: torch.Tensor) -> Any:
            asked.append(len(obs))
            assert not torch.is_grad_enabled()
            return obs.sum(1), {"mean": obs[:, :2]}

        buffer = rl.DistillationBuffer(100, obs=3)
        buffer.fill(replay, teacher, batch_size=20)
        assert asked == [20, 20, len(seen) - 40]
        batch = buffer.sample(50)
        assert torch.equal(batch["action"], batch["obs"].sum(1))
        assert torch.equal(batch["mean"], batch["obs"][:, :2])
        plain = rl.DistillationBuffer(100, obs=3)
        plain.fill(replay, lambda obs: obs[:, 0])
        batch = plain.sample(50)
        assert torch.equal(batch["action"], batch["obs"][:, 0])

    def test_fill_from_a_rollout(self, backend: str) -> None:
        env = vector([((3, "terminated"), (5, "truncated"))] * 2, AutoresetMode.NEXT_STEP)
        rollout = rl.RolloutBuffer.for_env(env, 10)
        obs, _ = env.reset()
        for _ in range(10):
            action = act(obs)
            step = env.step(action)
            rollout.add_step(obs.copy(), action, step, log_prob=action / 2)
            obs = step[0]
        buffer = rl.DistillationBuffer(100, obs=3, extra={"log_prob": ()})
        buffer.fill(rollout, batch_size=6)
        expected = next(rollout.minibatches(100, shuffle=False))
        batch = buffer[torch.arange(len(rollout))]
        assert len(buffer) == len(rollout) == 16
        assert all(torch.equal(batch[name], expected[name]) for name in ("obs", "action", "log_prob"))

    def test_nested_and_stacked_observations(self) -> None:
        replay = rl.ReplayBuffer(8, obs={"a": rl.Stacked(1, 2), "b": 1}, action=())
        stack = [[[t - 1.0, t]] for t in range(5)]
        stack[0] = [[0.0, 0.0]]
        for t in range(4):
            replay.add({"a": stack[t], "b": [t]}, t, 0.0, False, False, {"a": stack[t + 1], "b": [t + 1]})
        buffer = rl.DistillationBuffer(8, obs={"a": (1, 2), "b": 1})
        buffer.fill(replay, lambda obs: obs["b"] + obs["a"][:, 0])
        assert buffer[torch.arange(4)]["obs", "a"].tolist() == stack[:4]
        assert buffer[3]["action"].tolist() == [5.0, 6.0]

    def test_only_the_newest_rows_of_a_large_source_stay(self) -> None:
        replay, seen = make_replay()
        buffer = rl.DistillationBuffer(10, obs=3)
        buffer.fill(replay, batch_size=7)
        assert [row["obs"].tolist() for batch in buffer.epochs(4, shuffle=False) for row in batch] == seen[-10:]

    @pytest.mark.parametrize("count", [0, 3, 25])
    def test_a_teacher_that_fails_leaves_the_buffer_as_it_was(self, count: int) -> None:
        replay, _ = make_replay()
        buffer = rl.DistillationBuffer(30, obs=3, seed=0)
        if count:
            buffer.add(np.arange(3.0 * count).reshape(count, 3), np.arange(count))
        before = digest(buffer)
        for failure, message in [(lambda obs: 1 / 0, "division"), (lambda obs: obs, "action: expected")]:
            answers = iter([lambda obs: obs[:, 0].long(), lambda obs: obs[:, 0].long(), failure])
            with pytest.raises((ZeroDivisionError, rl.SchemaError), match=message):
                buffer.fill(replay, lambda obs, answers=answers: next(answers)(obs), batch_size=7)
            assert digest(buffer) == before
        buffer.fill(replay, lambda obs: obs[:, 0].long())
        assert len(buffer) == 30

    def test_what_cannot_be_copied_is_refused(self) -> None:
        replay, _ = make_replay()
        with pytest.raises(rl.SchemaError, match=r"fill: expected fields of the source \(.*\), got 'mean'"):
            rl.DistillationBuffer(30, obs=3, extra={"mean": 1}).fill(replay)
        with pytest.raises(rl.SchemaError, match=r"obs: expected shape \(\d+, 4\) for \d+ rows"):
            rl.DistillationBuffer(30, obs=4).fill(replay)
        with pytest.raises(rl.SchemaError, match="fill: expected a ReplayBuffer or a RolloutBuffer, got list"):
            rl.DistillationBuffer(30, obs=3).fill([1])  # type: ignore[arg-type]
        with pytest.raises(rl.NotReadyError, match="fill: expected at least 1 stored transition, got 0"):
            rl.DistillationBuffer(30, obs=3).fill(rl.ReplayBuffer(4, obs=3, action=()))


class TestAround:
    def test_repr_names_rows_and_round(self) -> None:
        assert repr(make_buffer(3)) == "DistillationBuffer(3 of 16 rows, round=0, fields=(obs, action), device='cpu')"


def test_a_first_add_is_checked_against_rows_that_its_value_added() -> None:
    buffer = rl.DistillationBuffer(8, 1, seed=0)

    class Adding:
        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
            if not len(buffer):
                buffer.add([[1.0]], [[2, 3]], note=[4.0])
            return np.array([[5.0]])

    with pytest.raises(rl.SchemaError):
        buffer.add([[6.0]], Adding())
    assert len(buffer) == 1
