"""Sequences of a rollout, against lists cut by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

import relive as rl
from tests import scripted
from tests.conftest import BACKENDS
from tests.reference import sequences as reference
from tests.tiers import select

MODES = ("chunked", "overlap", "every")


def make_rollout(ended: list[list[bool]], **options: Any) -> rl.RolloutBuffer:
    """Return a rollout with the ends [T][N]; obs is the row t·N + n, the hidden state −(t·N + n)."""
    steps, envs = len(ended), len(ended[0])
    extra = {"hidden": {"a": rl.Carry(2)}}
    rollout = rl.RolloutBuffer(steps, envs, obs=1, action=(), extra=extra, seed=0, **options)
    for t in range(steps):
        row = torch.arange(t * envs, (t + 1) * envs, dtype=torch.float32)
        rollout.add(
            row.unsqueeze(1), row, torch.zeros(envs), np.array(ended[t]), np.zeros(envs, bool),
            hidden={"a": -row.unsqueeze(1).expand(envs, 2)},
        )  # fmt: skip
    rollout.check()
    return rollout


def golden(**options: Any) -> rl.RolloutBuffer:
    """Return a rollout of two environments and five steps; environment 0 ends an episode at t = 1."""
    return make_rollout([[t == 1, False] for t in range(5)], **options)


def row_numbers(batch: Any) -> list[list[int]]:
    """Return the row numbers of the steps in a batch-first batch."""
    return [obs[mask].flatten().int().tolist() for obs, mask in zip(batch["obs"], batch["mask"], strict=True)]


def episode_ends(rollout: rl.RolloutBuffer) -> torch.Tensor:
    return rollout["terminated"] | rollout["truncated"]


@st.composite
def endings(draw: st.DrawFn) -> list[list[bool]]:
    steps, envs = draw(st.integers(1, 14)), draw(st.integers(1, 4))
    rate = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    generator = np.random.default_rng(draw(st.integers(0, 2**31)))
    return (generator.random((steps, envs)) < rate).tolist()


class TestWhichSteps:
    def test_chunks_without_their_tails_as_written_down(self, backend: str):
        (batch,) = golden().sequences(3, keep_tail=False, shuffle=False)
        assert row_numbers(batch) == [[0, 2], [4, 6, 8], [1, 3, 5]]
        assert batch["mask"].tolist() == [[True, True, False], [True] * 3, [True] * 3]
        assert batch["index"].tolist() == [0, 4, 1]
        assert batch["hidden", "a"].tolist() == [[0, 0], [-4, -4], [-1, -1]]

    @pytest.mark.parametrize(
        ("length", "mode", "episode", "expected"),
        [
            (4, "chunked", 10, [(0, 4), (4, 8), (8, 10)]),
            (4, "overlap", 10, [(0, 4), (2, 6), (4, 8), (6, 10)]),
            (4, "overlap", 7, [(0, 4), (2, 6), (4, 7)]),
            (4, "every", 6, [(0, 4), (1, 5), (2, 6)]),
            (4, "every", 3, [(0, 3)]),
            (None, "chunked", 6, [(0, 6)]),
            (1, "overlap", 3, [(0, 1), (1, 2), (2, 3)]),
        ],
    )
    def test_starts_of_each_mode_by_hand(self, backend: str, length: int, mode: Any, episode: int, expected: list):
        (batch,) = make_rollout([[False]] * episode).sequences(length, mode=mode, shuffle=False)
        assert [(rows[0], rows[-1] + 1) for rows in row_numbers(batch)] == expected

    @pytest.mark.parametrize("split", [True, False])
    @pytest.mark.parametrize("keep_tail", [True, False])
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("next_step", select(True, of=[False, True]))
    @settings(deadline=None, max_examples=25)
    @given(ended=endings(), length=st.one_of(st.none(), st.integers(1, 6)))
    def test_every_mode_agrees_with_lists_cut_by_hand(
        self, split: bool, keep_tail: bool, mode: Any, next_step: bool, ended: list, length: int | None
    ):
        rollout = make_rollout(ended, autoreset=AutoresetMode.NEXT_STEP if next_step else None)
        mask = rollout.data["mask"]
        expected = reference.sequences(episode_ends(rollout), mask, length, mode, split, keep_tail)
        for backend in BACKENDS.values():
            with backend():
                (batch,) = rollout.sequences(
                    length, mode=mode, split_episodes=split, keep_tail=keep_tail, shuffle=False
                )
            assert row_numbers(batch) == expected
            starts = [rows[0] for rows in expected]
            assert batch["index"].tolist() == starts
            assert batch["hidden", "a"][:, 0].int().tolist() == [-row for row in starts]
            padding = batch["obs"].squeeze(-1)[~batch["mask"]]
            assert not padding.any()

    @settings(deadline=None)
    @given(ended=endings(), length=st.integers(1, 6), size=st.integers(1, 5), seed=st.integers(0, 99))
    def test_chunks_with_their_tails_hold_every_valid_step_exactly_once(
        self, ended: list, length: int, size: int, seed: int
    ):
        rollout = make_rollout(ended, autoreset=AutoresetMode.NEXT_STEP)
        seen = [
            row for batch in rollout.sequences(length, batch_size=size) for run in row_numbers(batch) for row in run
        ]
        assert sorted(seen) == rollout.data["mask"].flatten().nonzero().squeeze(1).tolist()

    def test_sequences_that_cross_ends_say_where_episodes_start(self, backend: str):
        (batch,) = golden().sequences(4, split_episodes=False, shuffle=False)
        assert row_numbers(batch) == [[0, 2, 4, 6], [8], [1, 3, 5, 7], [9]]
        assert batch["is_first"].int().tolist() == [[1, 0, 1, 0], [0] * 4, [1, 0, 0, 0], [0] * 4]

    @pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
    @pytest.mark.parametrize("split", [True, False])
    def test_each_way_of_resetting_gives_the_same_first_steps(self, backend: str, mode: AutoresetMode, split: bool):
        """Three rollouts in a row: an episode may continue from one rollout into the next."""
        scripts = [((3, "terminated"), (2, "truncated")), ((4, "truncated"),)]
        envs = scripted.vector(scripts, mode)
        rollout = rl.RolloutBuffer.for_env(envs, 5)
        obs, _ = envs.reset()
        seen: dict[tuple[float, ...], bool] = {}
        for _ in range(3):
            for _ in range(5):
                action = scripted.act(obs)
                before, (step, obs) = obs.copy(), scripted.step_and_reset(envs, action)
                rollout.add_step(before, action, step)
            for batch in rollout.sequences(2, split_episodes=split):
                for state, first in zip(batch["obs"][batch["mask"]], batch["is_first"][batch["mask"]], strict=True):
                    seen[tuple(state.tolist())] = bool(first)
            rollout.clear()
        for (env, episode, step), first in seen.items():
            assert first == (step == 0), (env, episode, step)
        assert len(seen) >= 20

    def test_environments_that_were_restarted_begin_episodes(self):
        rollout = make_rollout([[False, True]])
        rollout.clear()
        assert rollout._flags.first_starts.tolist() == [False, True]
        rollout.clear(restarted=True)
        assert rollout._flags.first_starts.tolist() == [True, True]


class TestLayouts:
    def test_time_first_is_the_transpose(self, backend: str):
        rollout = golden()
        (batch,) = rollout.sequences(3, shuffle=False)
        (timed,) = rollout.sequences(3, shuffle=False, layout="time_first")
        for key in ("obs", "action", "mask", "is_first"):
            torch.testing.assert_close(timed[key], batch[key].transpose(0, 1))
        assert timed["hidden", "a"].tolist() == batch["hidden", "a"].tolist()

    @settings(deadline=None)
    @given(ended=endings(), length=st.integers(1, 6))
    def test_packed_sequences_unpack_to_the_padded_ones(self, ended: list, length: int):
        rollout = make_rollout(ended)
        (padded,) = rollout.sequences(length, shuffle=False)
        (packed,) = rollout.sequences(length, shuffle=False, layout="packed")
        unpacked, counts = pad_packed_sequence(
            PackedSequence(packed["obs"], packed["batch_sizes"]), batch_first=True, total_length=length
        )
        order = [padded["index"].tolist().index(row) for row in packed["index"].tolist()]
        assert counts.tolist() == sorted(padded["mask"].sum(1).tolist(), reverse=True)
        torch.testing.assert_close(unpacked, padded["obs"][order])
        torch.testing.assert_close(packed["hidden", "a"], padded["hidden", "a"][order])

    def test_a_recurrent_network_sees_the_same_in_every_layout(self, backend: str):
        rollout = golden()
        gru = torch.nn.GRU(1, 2, batch_first=True)
        (padded,) = rollout.sequences(3, shuffle=False)
        (packed,) = rollout.sequences(3, shuffle=False, layout="packed")
        whole, _ = gru(padded["obs"], padded["hidden", "a"].unsqueeze(0))
        flat, _ = gru(PackedSequence(packed["obs"], packed["batch_sizes"]), packed["hidden", "a"].unsqueeze(0))
        by_row = dict(zip(padded["action"][padded["mask"]].tolist(), whole[padded["mask"]].tolist(), strict=True))
        for row, out in zip(packed["action"].tolist(), flat.data.tolist(), strict=True):
            # States of up to 9 are rounded to float32.
            assert out == pytest.approx(by_row[row], abs=1e-5)

    def test_the_sizes_of_packed_sequences_stay_on_the_host(self, backend: str):
        (here,) = golden().sequences(3, layout="packed", shuffle=False)
        (there,) = golden().sequences(3, layout="packed", shuffle=False, device="meta")
        assert {there[key].device.type for key in ("obs", "is_first", "index", ("hidden", "a"))} == {"meta"}
        assert there["batch_sizes"].tolist() == here["batch_sizes"].tolist() == [4, 4, 2]
        packed = PackedSequence(there["obs"], there["batch_sizes"])
        assert packed.data.device.type == "meta"

    def test_packed_sequences_have_no_sizes_beyond_the_longest(self, backend: str):
        (packed,) = golden().sequences(9, layout="packed")
        assert packed["batch_sizes"].tolist() == [3, 3, 2, 1, 1]

    def test_a_length_beyond_the_rollout_pads_to_the_length(self, backend: str):
        (batch,) = golden().sequences(9)
        assert batch["obs"].shape == (3, 9, 1)


class TestBatches:
    def test_batches_hold_all_sequences_in_each_epoch(self):
        batches = list(golden().sequences(2, batch_size=2, epochs=2))
        assert [len(batch) for batch in batches] == [2, 2, 2, 2, 2, 2]
        for epoch in (batches[:3], batches[3:]):
            assert torch.cat([batch["index"] for batch in epoch]).sort().values.tolist() == [0, 1, 4, 5, 8, 9]

    def test_a_constant_batch_size_drops_the_remainder(self):
        assert [len(batch) for batch in golden().sequences(2, batch_size=4, drop_last=True)] == [4]
        with pytest.raises(rl.NotReadyError, match="sequences: expected 7 sequences, got 6"):
            golden().sequences(2, batch_size=7, drop_last=True)

    def test_order_is_the_seeds(self):
        orders = {tuple(next(golden().sequences(2))["index"].tolist()) for _ in range(2)}
        assert len(orders) == 1
        assert orders != {(0, 4, 8, 1, 5, 9)}

    def test_attached_fields_are_read_and_named_ones_only(self):
        rollout = golden()
        rollout.attach(advantage=torch.arange(10.0).view(5, 2))
        (batch,) = rollout.sequences(3, fields=["advantage", ("hidden", "a")], shuffle=False)
        assert batch["advantage"][0].tolist() == [0, 2, 0]
        names = {str(key) for key in batch.keys()}
        assert names == {"advantage", "hidden", "mask", "is_first", "index"}

    def test_batches_are_the_callers_own(self):
        rollout = golden()
        (batch,) = rollout.sequences(3)
        batch["obs"].fill_(99)
        batch["hidden", "a"].fill_(99)
        assert rollout["obs"].max() == 9
        assert rollout["hidden", "a"].max() == 0

    def test_more_fields_than_the_core_takes_at_once_are_read_all_the_same(self):
        names = [f"x{i}" for i in range(140)]
        rollout = rl.RolloutBuffer(2, 1, obs=1, action=(), extra=dict.fromkeys(names, ()))
        for t in range(2):
            flags: Any = [[False], [False]]
            rollout.add([[t]], [0.0], [0.0], *flags, **{name: [i + t] for i, name in enumerate(names)})
        (batch,) = rollout.sequences(2)
        assert [batch[name].tolist() for name in names] == [[[i, i + 1]] for i in range(140)]

    def test_one_environment_without_an_axis(self, backend: str):
        rollout = rl.RolloutBuffer(4, None, obs=1, action=(), extra={"hidden": rl.Carry(1)})
        for t in range(4):
            rollout.add([t], 0.0, 0.0, t == 2, False, hidden=[10 + t])
        (batch,) = rollout.sequences(2, shuffle=False)
        assert row_numbers(batch) == [[0, 1], [2], [3]]
        assert batch["hidden"].squeeze(-1).tolist() == [10, 12, 13]

    def test_a_cleared_rollout_is_refused(self):
        rollout = golden()
        batches = rollout.sequences(2, batch_size=1)
        next(batches)
        rollout.clear()
        with pytest.raises(
            rl.NotReadyError, match="expected the rollout that the epochs began with, got a cleared one"
        ):
            next(batches)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"length": 0}, "length: expected a positive int, got 0"),
            ({"length": 2, "mode": "half"}, 'mode: expected "chunked", "overlap" or "every", got \'half\''),
            ({"length": 2, "layout": "flat"}, 'layout: expected "batch_first", "time_first" or "packed", got'),
            ({"length": 2, "batch_size": 0}, "batch_size: expected a positive int, got 0"),
            ({"length": 2, "epochs": 0}, "epochs: expected a positive int, got 0"),
            ({"length": 2, "fields": ["nothing"]}, r"fields: expected stored fields \(.*\), got nothing"),
        ],
    )
    def test_wrong_arguments_are_refused_at_the_call(self, arguments: dict[str, Any], message: str):
        with pytest.raises(rl.SchemaError, match=message):
            golden().sequences(**arguments)

    def test_an_empty_rollout_is_refused(self):
        with pytest.raises(rl.NotReadyError, match="sequences: expected at least 1 stored step, got 0"):
            rl.RolloutBuffer(2, 2, obs=1, action=()).sequences(2)

    def test_a_rollout_of_reset_rows_alone_has_no_sequences(self):
        rollout = make_rollout([[True]], autoreset=AutoresetMode.NEXT_STEP)
        rollout.clear()
        rollout.add([[0.0]], [0.0], [0.0], [False], [False], hidden={"a": [[0.0, 0.0]]})
        assert list(rollout.sequences(2)) == []
