"""ApexRL's recurrent rollout buffer: sequences are slices of the rollout in its order."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import relive as rl
from relive.compat import apexrl


def make_recurrent_buffer(
    num_envs: int = 2, num_steps: int = 4, filled: int | None = None, obs_shape: Any = (1,), **options: Any
) -> apexrl.RolloutRNNBuffer:
    """Make a filled buffer: observation 10·t + n, actor's hidden state 100·layer + 10·t + n, critic's its negative."""
    hidden = ((3, 5), (2, 4))
    buffer = apexrl.RolloutRNNBuffer(num_envs, num_steps, obs_shape, (), torch.long, *hidden, "cpu", seed=0, **options)
    for t in range(num_steps if filled is None else filled):
        number = 10.0 * t + torch.arange(num_envs)
        actor, critic = (
            (100 * torch.arange(layers).view(-1, 1, 1) + number.view(1, -1, 1)).expand(-1, -1, size)
            for layers, size in hidden
        )
        obs: Any = number.unsqueeze(1)
        obs = {"x": obs} if isinstance(obs_shape, dict) else obs
        dones = (number % 3 == 0).float()
        buffer.add(obs, None, number.long(), number / 2, dones, number / 4, -number, actor, -critic)
    return buffer


class TestRecurrent:
    def test_the_golden_order_is_that_of_chunks_then_environments(self) -> None:
        batches = list(make_recurrent_buffer().get_sequence_minibatches(2, 3, shuffle=False))
        starts = [(int(x) % 10, int(x) // 10) for batch in batches for x in batch["observations"][0, :, 0]]
        assert starts == [(0, 0), (1, 0), (0, 2), (1, 2)]
        assert [batch["observations"].shape for batch in batches] == [(2, 3, 1), (2, 1, 1)]

    @given(
        st.integers(1, 4), st.sampled_from([(4, 1), (4, 2), (6, 3), (6, 6)]), st.integers(1, 9), st.booleans(),
        st.booleans(),
    )  # fmt: skip
    @settings(deadline=None, max_examples=60)
    def test_sequences_are_slices_of_the_rollout(
        self, envs: int, sizes: tuple[int, int], minibatch: int, shuffle: bool, partly: bool
    ) -> None:
        steps, length = sizes
        chunks = (steps // length + 1) // 2 if partly else steps // length
        buffer = make_recurrent_buffer(envs, steps, filled=chunks * length)
        buffer.compute_returns_and_advantages(torch.ones(envs))
        actual = []
        for batch in buffer.get_sequence_minibatches(length, minibatch, shuffle=shuffle):
            count = batch["values"].shape[1]
            assert count <= minibatch
            for i in range(count):
                first = int(batch["observations"][0, i, 0])
                t, n = first // 10, first % 10
                assert t % length == 0
                slices = {
                    "observations": buffer.observations, "actions": buffer.actions, "old_log_probs": buffer.log_probs,
                    "advantages": buffer.advantages, "returns": buffer.returns, "values": buffer.values,
                    "dones": buffer.dones,
                }  # fmt: skip
                for name, whole in slices.items():
                    assert torch.equal(batch[name][:, i], whole[t : t + length, n]), name
                for name in ("actor_hidden_states", "critic_hidden_states"):
                    assert torch.equal(batch[name][:, i], getattr(buffer, name)[t, n])
                actual.append((t, n))
        everything = [(chunk * length, n) for chunk in range(chunks) for n in range(envs)]
        assert sorted(actual) == everything
        assert shuffle or actual == everything

    def test_a_batch_is_what_a_recurrent_network_takes(self) -> None:
        buffer = make_recurrent_buffer()
        batch = next(buffer.get_sequence_minibatches(2, 2, shuffle=False))
        assert list(batch) == [
            "observations", "privileged_observations", "actions", "old_log_probs", "advantages", "returns", "values",
            "dones", "actor_hidden_states", "critic_hidden_states",
        ]  # fmt: skip
        assert batch["privileged_observations"] is None
        assert batch["actor_hidden_states"].tolist() == [[[100.0 * k + n] * 5 for n in range(2)] for k in range(3)]
        assert batch["critic_hidden_states"].shape == (2, 2, 4)
        network = torch.nn.GRU(1, 5, num_layers=3)
        network(batch["observations"], batch["actor_hidden_states"])
        assert buffer.actor_hidden_states.shape == (4, 2, 3, 5)

    def test_an_end_inside_a_sequence_stays_inside(self) -> None:
        (batch,) = make_recurrent_buffer(1).get_sequence_minibatches(4, 9)
        assert batch["dones"].flatten().tolist() == [1.0, 0.0, 0.0, 1.0]

    def test_nested_observations_are_tensordicts(self) -> None:
        for shuffle in (True, False):
            for batch in make_recurrent_buffer(obs_shape={"x": (1,)}).get_sequence_minibatches(2, 3, shuffle=shuffle):
                assert isinstance(batch["observations"], TensorDict)
                assert torch.equal(batch["observations"]["x"][..., 0].long(), batch["actions"])

    def test_sizes_are_refused_as_apexrl_does(self) -> None:
        buffer = make_recurrent_buffer()
        for sizes, message in (
            ((0, 1), "sequence_length: expected an int of at least 1"),
            ((1, 0), "minibatch_size: expected an int of at least 1"),
            ((3, 1), "sequence_length: expected a divisor of num_steps = 4"),
        ):
            with pytest.raises(ValueError, match=f"^{message}, got"):
                next(buffer.get_sequence_minibatches(*sizes))
        zeros, hidden = torch.zeros(2), torch.zeros(3, 2, 5)
        with pytest.raises(ValueError, match="^add: expected at most 4 steps"):
            buffer.add(zeros, None, zeros, zeros, zeros, zeros, zeros, hidden, hidden)

    def test_a_rollout_that_ends_inside_a_sequence_is_not_ready(self) -> None:
        with pytest.raises(rl.NotReadyError, match="get_sequence_minibatches: expected a multiple of 2 steps, got 3"):
            make_recurrent_buffer(filled=3).get_sequence_minibatches(2, 1)

    def test_hidden_states_are_checked(self) -> None:
        buffer = make_recurrent_buffer(filled=0)
        two = torch.zeros(2)
        step = (torch.zeros(2, 1), None, two.long(), two, two, two, two)
        for wrong in (torch.zeros(2, 3, 5), torch.zeros(3, 1, 5), torch.zeros(5), None):
            with pytest.raises(rl.SchemaError, match="actor_hidden_states: expected"):
                buffer.add(*step, wrong, torch.zeros(2, 2, 4))
        assert len(buffer) == 0

    def test_moves_clears_and_stages_like_the_other(self) -> None:
        buffer = make_recurrent_buffer(filled=1, privileged_obs_shape=None)
        obs, two = torch.full((2, 1), 7.0), torch.zeros(2)
        buffer.stage(obs, None, two.long())
        obs += 1
        buffer.add(None, None, None, two, two, two, two, torch.zeros(3, 2, 5), torch.zeros(2, 2, 4))
        assert buffer.observations[1].tolist() == [[7.0], [7.0]]
        assert (buffer.step, len(buffer)) == (2, 4)
        assert buffer.to("cpu") is buffer
        assert buffer.observations[1].tolist() == [[7.0], [7.0]]
        assert buffer.to("meta").actor_hidden_states.device.type == "meta"
        buffer.clear()
        assert (buffer.step, len(buffer)) == (0, 0)

    def test_writes_count_and_copies_go_on_alike(self) -> None:
        buffer = make_recurrent_buffer()
        buffer.compute_returns_and_advantages(torch.ones(2))
        buffer.rewards *= 2
        buffer.dones[0, 1] = 1
        buffer.actor_hidden_states[0] = 9
        other = pickle.loads(pickle.dumps(copy.deepcopy(buffer)))
        for one, two in zip(*(x.get_sequence_minibatches(2, 2) for x in (buffer, other)), strict=True):
            assert torch.equal(one["observations"], two["observations"])
            assert torch.equal(one["advantages"], two["advantages"])
        (batch,) = buffer.get_sequence_minibatches(4, 2, shuffle=False)
        assert batch["actor_hidden_states"].eq(9).all()
        assert batch["dones"][0].tolist() == [1.0, 1.0]
        buffer.step = 0
        assert (len(buffer), len(other)) == (0, 8)

    def test_privileged_observations_join_the_sequences(self) -> None:
        buffer = apexrl.RolloutRNNBuffer(1, 2, (1,), (), torch.long, (1, 1), (1, 1), "cpu", (2,))
        for t in range(2):
            one, hidden = torch.full((1,), float(t)), torch.zeros(1, 1, 1)
            buffer.add(one.view(1, 1), one.expand(1, 2), one.long(), one, 0 * one, one, one, hidden, hidden)
        (batch,) = buffer.get_sequence_minibatches(2, 1)
        assert batch["privileged_observations"].tolist() == [[[0.0, 0.0]], [[1.0, 1.0]]]
