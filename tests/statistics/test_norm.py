"""The running norm: mean and deviation of all rows together, in whichever blocks they were passed."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st

import relive as rl
from relive import kernels
from tests.scripted import Script, act, step_and_reset, transitions, vector

SCRIPTS: list[Script] = [((3, "terminated"), (2, "truncated")), ((1, "truncated"), (4, "both"))]


def assert_moments(norm: rl.RunningNorm, rows: np.ndarray) -> None:
    """Assert that the norm has the moments of exactly these rows [B, …]."""
    assert norm.count == len(rows)
    np.testing.assert_allclose(norm.mean.numpy(), rows.mean(0), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(norm.std.numpy(), rows.std(0), rtol=1e-7, atol=1e-7)


@st.composite
def pieces(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[np.ndarray, np.ndarray | None]]]:
    """Draw a shape, and blocks of rows with any leading axes; some blocks are masked or empty."""
    shape = draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    offset = draw(st.sampled_from([0.0, -5.0, 1e4]))
    blocks = []
    for _ in range(draw(st.integers(1, 4))):
        lead = draw(st.sampled_from([(1,), (4,), (0,), (2, 3), (3, 1, 2)]))
        x = offset + rng.standard_normal((*lead, *shape)) * draw(st.sampled_from([1.0, 0.1, 30.0]))
        mask = rng.random(lead) < 0.6 if draw(st.booleans()) else None
        blocks.append((x, mask))
    return shape, blocks


def pooled(shape: tuple[int, ...], blocks: list[tuple[np.ndarray, np.ndarray | None]]) -> np.ndarray:
    counted = [x[np.ones(x.shape[: x.ndim - len(shape)], bool) if mask is None else mask] for x, mask in blocks]
    return np.concatenate([x.reshape(-1, *shape) for x in counted])


@settings(deadline=None)
@given(pieces())
def test_blocks_give_what_numpy_finds_in_all_rows_together(given_: Any) -> None:
    shape, blocks = given_
    norm, rows = rl.RunningNorm(shape), pooled(shape, blocks)
    for x, mask in blocks:
        given_rows = x.copy()
        if mask is not None:
            # Masked rows are NaN, because they must not be counted.
            given_rows[~mask] = np.nan
        norm.update(given_rows, mask)
    if len(rows):
        assert_moments(norm, rows)
        x = torch.as_tensor(rows)
        expected = (rows - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-8)
        np.testing.assert_allclose(norm(x).numpy(), expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(norm.denormalize(norm(x)).numpy(), rows, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(norm.scale(x).numpy(), rows / np.sqrt(rows.var(0) + 1e-8), rtol=1e-5)
    else:
        assert norm.count == 0


@settings(deadline=None)
@given(pieces(), st.randoms(use_true_random=False))
def test_norms_of_parts_merge_into_the_norm_of_the_whole(given_: Any, random: Any) -> None:
    shape, blocks = given_
    parts = []
    for x, mask in blocks:
        parts.append(rl.RunningNorm(shape))
        parts[-1].update(x, mask)
    random.shuffle(parts)
    whole = rl.RunningNorm(shape)
    for part in parts:
        before = part.snapshot()
        whole.merge(part)
        assert all(torch.equal(tensor, before[name]) for name, tensor in part.snapshot().items())
    rows = pooled(shape, blocks)
    if len(rows):
        assert_moments(whole, rows)
    else:
        assert whole.count == 0


def test_small_changes_of_a_large_number_are_seen() -> None:
    norm = rl.RunningNorm()
    for t in range(1000):
        norm.update(np.array([1e9 + t % 2]))
    assert norm.mean.item() == pytest.approx(1e9 + 0.5, rel=1e-15)
    assert norm.std.item() == pytest.approx(0.5, rel=1e-6)


class TestNormalizing:
    def test_is_the_identity_before_the_first_row(self) -> None:
        for norm in (rl.RunningNorm(2), rl.RunningNorm(2, eps=5.0)):
            norm.update(np.zeros((0, 2)))
            norm.update(np.ones((3, 2)), mask=[False] * 3)
            x = torch.tensor([[3.0, -7.0]], dtype=torch.float64)
            for same in (norm(x), norm.normalize(x), norm.denormalize(x), norm.scale(x)):
                assert torch.equal(same, x)
            assert (norm.count, norm.mean.tolist(), norm.std.tolist()) == (0, [0.0, 0.0], [1.0, 1.0])

    def test_normalisation_follows_every_update(self) -> None:
        norm = rl.RunningNorm()
        norm.update([0.0, 2.0])
        assert norm(torch.tensor([2.0])).tolist() == [1.0]
        norm.update([10.0, 12.0])
        assert norm(torch.tensor([6.0])).tolist() == [0.0]
        norm.clear()
        assert norm(torch.tensor([6.0])).tolist() == [6.0]

    def test_clips_what_is_far_away(self) -> None:
        norm = rl.RunningNorm(clip=2.0)
        norm.update([-1.0, 1.0])
        assert norm(torch.tensor([-9.0, 0.5, 9.0])).tolist() == [-2.0, 0.5, 2.0]
        assert norm.scale(torch.tensor([9.0])).tolist() == [2.0]
        assert norm.denormalize(torch.tensor([9.0])).tolist() == [9.0]

    def test_scale_keeps_the_sign_of_what_is_below_the_mean(self) -> None:
        norm = rl.RunningNorm()
        norm.update([1.0, 3.0])
        assert norm.scale(torch.tensor([0.5, -2.0])).tolist() == [0.5, -2.0]
        assert norm(torch.tensor([0.5])).tolist() == [-1.5]

    def test_gradients_flow_through_normalisation_but_are_not_stored(self) -> None:
        norm = rl.RunningNorm(2)
        x = torch.tensor([[1.0, 10.0], [3.0, 30.0]], requires_grad=True)
        norm.update(x)
        assert not norm.mean.requires_grad
        norm(x).sum().backward()
        assert x.grad is not None
        assert x.grad[0].tolist() == pytest.approx([1.0, 0.1])

    @pytest.mark.parametrize(
        ("given", "returned"),
        [
            (torch.float32, torch.float32),
            (torch.float64, torch.float64),
            (torch.float16, torch.float16),
            (torch.bfloat16, torch.bfloat16),
            (torch.uint8, torch.float32),
        ],
    )
    def test_returns_the_dtype_it_was_given(self, given: torch.dtype, returned: torch.dtype) -> None:
        norm = rl.RunningNorm(1)
        norm.update(torch.tensor([[0], [4]], dtype=given))
        result = norm(torch.tensor([[0], [4]], dtype=given))
        assert result.dtype == returned
        assert result.flatten().tolist() == pytest.approx([-1.0, 1.0])
        assert norm(np.array([[4.0]])).dtype == torch.float64

    @pytest.mark.parametrize("x", [np.zeros(3), np.zeros((4, 1)), 1.0, np.zeros((2, 2), complex), "x", None])
    def test_refuses_another_shape(self, x: Any) -> None:
        norm = rl.RunningNorm(2)
        for call in (norm, norm.update, norm.scale, norm.denormalize):
            with pytest.raises(rl.SchemaError, match="x: expected"):
                call(x)
        assert norm.count == 0

    def test_refuses_a_mask_of_another_shape_and_arguments_that_cannot_be(self) -> None:
        norm = rl.RunningNorm(2)
        with pytest.raises(rl.SchemaError, match=r"mask: expected shape \(3,\)"):
            norm.update(np.ones((3, 2)), mask=np.ones((3, 2), bool))
        with pytest.raises(rl.SchemaError, match="merge: expected a norm of shape"):
            norm.merge(rl.RunningNorm(3))
        assert norm.count == 0
        for wrong in ({"eps": 0.0}, {"eps": -1.0}, {"clip": 0.0}, {"clip": "x"}, {"shape": (0,)}):
            with pytest.raises(rl.SchemaError):
                rl.RunningNorm(**{"shape": 2, **wrong})


class TestKeeping:
    def test_what_is_passed_in_is_left_alone(self) -> None:
        x = torch.arange(6.0, dtype=torch.float64).view(3, 2)
        before, norm = x.clone(), rl.RunningNorm(2)
        norm.update(x)
        norm.update(x, mask=[True, False, True])
        norm(x)
        assert torch.equal(x, before)

    def test_a_snapshot_brings_back_what_came_after(self) -> None:
        norm, other = rl.RunningNorm(2), rl.RunningNorm(2)
        norm.update(np.array([[1.0, 2.0], [3.0, 5.0]]))
        snapshot = norm.snapshot()
        for _ in range(2):
            other.restore(snapshot)
            other.update(np.array([[9.0, 9.0]]))
        norm.update(np.array([[9.0, 9.0]]))
        assert all(torch.equal(tensor, norm.snapshot()[name]) for name, tensor in other.snapshot().items())
        with pytest.raises(rl.SchemaError, match="RunningNorm: expected a snapshot of"):
            norm.restore(rl.RunningNorm(3).snapshot())
        assert norm.count == 3

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda norm: pickle.loads(pickle.dumps(norm))])
    def test_a_copy_goes_on_alone(self, copied: Any) -> None:
        norm = rl.RunningNorm(1)
        norm.update([[1.0], [3.0]])
        other = copied(norm)
        other.update([[8.0]])
        assert (norm.mean.item(), norm.count) == (2.0, 2)
        assert (other.mean.item(), other.count) == (4.0, 3)

    def test_nothing_asks_the_device_for_a_number(self) -> None:
        """A meta tensor has no values: reading one raises."""
        norm = rl.RunningNorm(2, clip=5.0).to("meta")
        x = torch.zeros((3, 2), device="meta")
        norm.update(x)
        norm.update(x, mask=torch.ones(3, dtype=torch.bool, device="meta"))
        norm.merge(rl.RunningNorm(2))
        assert norm.scale(norm.denormalize(norm(x))).shape == (3, 2)
        with pytest.raises(RuntimeError, match="meta"):
            _ = norm.count
        with pytest.raises(rl.SchemaError, match="x: expected a tensor on meta"):
            norm.update(torch.zeros(3, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64])
def test_values_far_from_zero_keep_all_their_digits(dtype: torch.dtype) -> None:
    """At 1e8, float32 numbers are 8 apart; the mean of these rows is between two of them."""
    x = 100_000_000 + 8 * torch.tensor([0, 0, 1, 2, 2, 2, 2])
    norm = rl.RunningNorm()
    norm.update(x)
    exact = (x - x.double().mean()) / x.double().std(correction=0)
    torch.testing.assert_close(norm(x.to(dtype)).double(), exact, rtol=0, atol=1e-6)
    assert norm.denormalize(norm(x.to(dtype))).tolist() == x.tolist()


def test_gradients_flow_after_values_were_normalised_in_inference_mode() -> None:
    norm = rl.RunningNorm(2)
    with torch.inference_mode():
        norm.update([[1.0, 10.0], [3.0, 30.0]])
        norm(torch.zeros(3, 2))
    for use, slope in ((norm.normalize, [1.0, 0.1]), (norm.scale, [1.0, 0.1]), (norm.denormalize, [1.0, 10.0])):
        x = torch.zeros(2, requires_grad=True)
        use(x).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, torch.tensor(slope))


class TestBuffers:
    @pytest.mark.parametrize("mode", list(AutoresetMode))
    @pytest.mark.parametrize("which", ["rollout", "replay"])
    def test_norms_count_the_observations_of_transitions_under_every_autoreset_mode(
        self, backend: str, which: str, mode: AutoresetMode
    ) -> None:
        envs = vector(SCRIPTS, mode)
        norms = {"obs": rl.RunningNorm(3), "reward": rl.RunningNorm()}
        make = rl.RolloutBuffer if which == "rollout" else rl.ReplayBuffer
        buffer = make.for_env(envs, 40, norm=norms)
        assert buffer.norm == norms
        obs, _ = envs.reset(seed=0)
        for _ in range(12):
            step, next_obs = step_and_reset(envs, act(obs))
            buffer.add_step(obs, act(obs), step)
            obs = next_obs
        # Under NEXT_STEP three of the twelve rows of each environment are dummy steps.
        count = 9 if mode is AutoresetMode.NEXT_STEP else 12
        happened = [found for env, script in enumerate(SCRIPTS) for found in transitions(env, script, count)]
        assert_moments(norms["obs"], np.array([found.obs for found in happened], np.float64))
        assert_moments(norms["reward"], np.array([found.reward for found in happened]))

    def test_a_leaf_of_a_nested_observation_has_a_norm_of_its_own(self, backend: str) -> None:
        declared = {"state": 2, "camera": rl.Field((2, 2), torch.uint8)}
        path, norm = ("obs", "camera"), rl.RunningNorm((2, 2))
        replay = rl.ReplayBuffer(8, obs=declared, action=(), num_envs=2, norm={path: norm})
        frames = np.arange(24, dtype=np.uint8).reshape(3, 2, 2, 2)
        for t in range(2):
            obs, next_obs = ({"state": np.full((2, 2), t), "camera": frames[t]} for t in (t, t + 1))
            replay.add(obs, [0, 0], [1, 1], [False] * 2, [False] * 2, next_obs)
        assert_moments(norm, frames[:2].reshape(4, 2, 2).astype(np.float64))
        batch = replay.sample(3)
        assert norm(batch[path]).dtype == torch.float32

    def test_blocks_and_single_environments_are_taken_in(self, backend: str) -> None:
        rng = np.random.default_rng(0)
        norm = rl.RunningNorm(2)
        replay = rl.ReplayBuffer(40, obs=2, action=(), num_envs=2, norm={"obs": norm})
        obs = rng.integers(0, 9, (6, 2, 2)).astype(np.float64)
        flags = np.zeros((5, 2), bool)
        replay.extend({"obs": obs[:5], "action": flags * 0.0, "reward": flags * 0.0, "terminated": flags,
                       "truncated": flags, "next_obs": obs[1:]})  # fmt: skip
        replay.add(obs[5, [1]], [0.0], [0.0], [False], [False], obs[5, [1]] + 1, env_ids=[1])
        assert_moments(norm, np.concatenate([obs[:5].reshape(10, 2), obs[5, [1]]]))
        alone = rl.RunningNorm(2)
        rollout = rl.RolloutBuffer(4, None, obs=2, action=(), norm={"obs": alone})
        for row in obs[:4, 0]:
            rollout.add(row, 0.0, 0.0, False, False)
        assert_moments(alone, obs[:4, 0])

    @pytest.mark.parametrize("make", [rl.RolloutBuffer, rl.ReplayBuffer])
    def test_norms_that_do_not_fit_are_refused_when_the_buffer_is_made(self, make: Any) -> None:
        for norm, message in (
            ({"obs": rl.RunningNorm(3)}, r"norm: expected leaves \(obs\.state, .*\), got obs\."),
            ({("obs", "state"): rl.RunningNorm(3)}, r"norm: obs.state: expected shape \(2,\), got \(3,\)"),
            ({"speed": rl.RunningNorm(3)}, r"norm: expected leaves \(obs\.state, action.*\), got speed\."),
            ({"reward": 3}, "norm: reward: expected a RunningNorm, got 3"),
            ({"reward": rl.RunningNorm(), ("reward",): rl.RunningNorm()}, "norm: reward: expected one norm, got two"),
        ):
            with pytest.raises(rl.SchemaError, match=message):
                make(4, num_envs=2, obs={"state": 2}, action=(), norm=norm)

    def test_a_refused_step_is_not_counted(self) -> None:
        norm = rl.RunningNorm(2)
        for buffer in (
            rl.RolloutBuffer(4, 2, obs=2, action=(), norm={"obs": norm}),
            rl.ReplayBuffer(4, num_envs=2, obs=2, action=(), norm={"obs": norm}),
        ):
            last = () if isinstance(buffer, rl.RolloutBuffer) else (np.ones((2, 2)),)
            with pytest.raises(rl.SchemaError, match="action"):
                buffer.add(np.zeros((2, 2)), [0, 0, 0], [0, 0], [False] * 2, [False] * 2, *last)
        assert norm.count == 0


@pytest.mark.skipif(kernels.native_core() is None, reason="this install has no native core (no compiler)")
@pytest.mark.parametrize("shape", [(), (1,), (3,), (4,), (17,), (2, 24)], ids=str)
@pytest.mark.parametrize("rows", [1, 4, 5, 16, 33, 300])
def test_the_native_core_and_torch_ops_agree_within_rounding(shape: tuple[int, ...], rows: int) -> None:
    with kernels.force("torch"):
        by_ops = rl.RunningNorm(shape)
    native, random = rl.RunningNorm(shape), torch.Generator().manual_seed(rows)
    updates = 0
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int64):
        x = (torch.rand(rows, *shape, generator=random) * 200).to(dtype)
        for mask in (None, torch.rand(rows, generator=random) < 0.7):
            native.update(x, mask)
            by_ops.update(x, mask)
            updates += 1
            # Every sum has terms of one sign. A sum of n terms is off by at most n roundings, each merge by a few more.
            error = (2 * rows + 8 * updates) * 2.0**-53
            for name, moment in native.snapshot().items():
                torch.testing.assert_close(moment, by_ops.snapshot()[name], rtol=2 * error, atol=0)
