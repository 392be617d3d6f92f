"""Minibatches: every transition once per epoch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import relive as rl
from tests.rollout.steps import N, make, step


class TestMinibatches:
    @settings(max_examples=40, deadline=None)
    @given(
        steps=st.integers(1, 6),
        envs=st.integers(1, 4),
        size=st.integers(1, 30),
        epochs=st.integers(1, 3),
        drop_last=st.booleans(),
        shuffle=st.booleans(),
    )
    def test_every_row_once_an_epoch_in_exact_sizes(
        self, steps: int, envs: int, size: int, epochs: int, drop_last: bool, shuffle: bool
    ) -> None:
        rollout = make(steps, num_envs=envs, count=0)
        for t in range(steps):
            rollout.add(**step(t, n=envs))
        total = steps * envs
        options = {"epochs": epochs, "drop_last": drop_last, "shuffle": shuffle}
        if drop_last and total < size:
            with pytest.raises(rl.NotReadyError, match=f"expected {size} transitions, got {total}"):
                rollout.minibatches(size, **options)
            return
        batches = list(rollout.minibatches(size, **options))
        per_epoch = total // size if drop_last else -(-total // size)
        assert len(batches) == epochs * per_epoch
        for epoch in range(epochs):
            mine = batches[epoch * per_epoch : (epoch + 1) * per_epoch]
            assert [len(b) for b in mine[:-1]] == [size] * (per_epoch - 1)
            index = torch.cat([b["index"] for b in mine])
            assert len(set(index.tolist())) == len(index)
            assert len(index) == (total - total % size if drop_last else total)
            if not shuffle:
                assert index.tolist() == sorted(index.tolist())
            for batch in mine:
                assert torch.equal(batch["obs"][:, 0], batch["index"] // envs)
                assert torch.equal(batch["reward"], 10.0 * (batch["index"] // envs) + batch["index"] % envs)

    def test_order_is_uniform(self) -> None:
        rollout = make(1, num_envs=4, count=0)
        rollout.add(**step(0, n=4))
        seen: dict[tuple[int, ...], int] = {}
        for batch in rollout.minibatches(4, epochs=24 * 200):
            order = tuple(batch["index"].tolist())
            seen[order] = seen.get(order, 0) + 1
        assert len(seen) == 24
        chi_squared = sum((count - 200) ** 2 / 200 for count in seen.values())
        # With 23 degrees of freedom a larger χ² has the probability 0.001.
        assert chi_squared < 49.7

    def test_fields_says_what_is_read(self, backend: str) -> None:
        rollout = make(extra={"e": {"a": (), "b": ()}}, count=0)
        rollout.add(**step(0), e={"a": np.zeros(N), "b": np.ones(N)})
        batch = next(rollout.minibatches(2, fields=["action", ("e", "b")]))
        assert set(batch.keys(True, True)) == {"action", ("e", "b")}
        assert set(next(rollout.minibatches(2, fields=("e",)))["e"].keys()) == {"a", "b"}
        with pytest.raises(rl.SchemaError, match=r"fields: expected stored fields \(.*\), got e\.c"):
            rollout.minibatches(2, fields=[("e", "c")])

    def test_out_is_filled_and_returned(self, backend: str) -> None:
        rollout = make()
        out = next(rollout.minibatches(4))
        address = out["obs"].data_ptr()
        seen = []
        for batch in rollout.minibatches(4, out=out):
            assert batch is out
            assert batch["obs"].data_ptr() == address
            assert torch.equal(batch["obs"][:, 0], batch["index"] // N)
            seen += batch["index"].tolist()
        assert sorted(seen) == list(range(4 * N))

    def test_an_out_that_does_not_fit_is_refused(self) -> None:
        rollout = make()
        out = next(rollout.minibatches(4))
        with pytest.raises(rl.SchemaError, match="out: expected full batches of 5 transitions, got 12 transitions"):
            rollout.minibatches(5, out=next(rollout.minibatches(5)))
        with pytest.raises(rl.SchemaError, match=r"out\.obs: expected contiguous torch.float32 of shape \(6, 2\)"):
            rollout.minibatches(6, out=out)
        with pytest.raises(rl.SchemaError, match="out: expected the fields"):
            rollout.minibatches(4, out=out.exclude("obs"))
        with pytest.raises(rl.SchemaError, match=r"out\.obs: expected contiguous"):
            rollout.minibatches(4, out=out.clone().set("obs", torch.zeros(2, 4).T))

    def test_a_batch_of_no_fields_may_be_passed_as_out(self) -> None:
        rollout = make(4)
        out = TensorDict({}, batch_size=[4])
        assert [batch is out for batch in rollout.minibatches(4, fields=[], out=out)] == [True] * N
        with pytest.raises(rl.SchemaError, match="out: expected the fields"):
            rollout.minibatches(4, fields=[], out=next(rollout.minibatches(4)))

    def test_a_rollout_cleared_before_the_first_batch_is_noticed_too(self) -> None:
        rollout = make()
        batches = rollout.minibatches(4)
        rollout.clear()
        for t in range(4):
            rollout.add(**step(t + 10))
        with pytest.raises(
            rl.NotReadyError, match="expected the rollout that the epochs began with, got a cleared one"
        ):
            next(batches)

    def test_sizes_are_checked_at_the_call(self) -> None:
        with pytest.raises(rl.SchemaError, match="batch_size: expected a positive int, got 0"):
            make().minibatches(0)
        with pytest.raises(rl.SchemaError, match="epochs: expected a positive int, got 0"):
            make().minibatches(2, epochs=0)

    def test_device_moves_the_batch(self) -> None:
        batch = next(make().minibatches(4, device="meta"))
        assert isinstance(batch, TensorDict)
        assert batch["obs"].device.type == "meta"
