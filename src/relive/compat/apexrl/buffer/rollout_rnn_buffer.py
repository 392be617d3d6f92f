"""ApexRL's rollout buffer of recurrent policies on relive's core."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from tensordict import TensorDict

import relive as rl
from relive.compat.apexrl.buffer.overwritten import ReusedObs
from relive.compat.apexrl.buffer.rollout_buffer import TRAINING_FIELDS, SingleAgentRollout
from relive.compat.apexrl.utils.observation import Spec
from relive.compat.seeding import choose_seed
from relive.compat.step_rows import SCORES
from relive.compat.views import make_memory_views
from relive.errors import NotReadyError, explain
from relive.schema.checks import check_int
from relive.schema.fields import Field

_HIDDEN = ("actor_hidden_states", "critic_hidden_states")


class RolloutRNNBuffer(SingleAgentRollout):
    """`num_steps` steps of `num_envs` environments with the hidden states before each step, read as sequences.

    Networks use hidden states (layers, batch, hidden); the attributes store them as [num_steps, num_envs, layers,
    hidden]. Sequences continue across ends of episodes: `dones` mark the steps after which the network must reset its
    state.

    `RolloutBuffer` lists the differences from ApexRL; sequences contain only stored steps. Shuffling does not
    use the global generator; `seed` makes it repeatable.

    >>> buffer = RolloutRNNBuffer(2, 4, (3,), (), torch.long, (1, 8), (1, 8), "cpu")
    >>> buffer.actor_hidden_states.shape
    torch.Size([4, 2, 1, 8])
    """

    actor_hidden_states, critic_hidden_states = make_memory_views(*_HIDDEN)

    def __init__(
        self, num_envs: int, num_steps: int, obs_shape: Spec, action_shape: tuple[int, ...],
        action_dtype: torch.dtype, actor_hidden_shape: tuple[int, ...], critic_hidden_shape: tuple[int, ...],
        device: torch.device | str, privileged_obs_shape: Spec | None = None, *, seed: int | None = None,
    ) -> None:  # fmt: skip
        self.num_envs, self.num_steps = num_envs, num_steps
        self.obs_shape, self.privileged_obs_shape = obs_shape, privileged_obs_shape
        self.action_shape, self.action_dtype = action_shape, action_dtype
        self.actor_hidden_shape, self.critic_hidden_shape = actor_hidden_shape, critic_hidden_shape
        self._reused_obs = ReusedObs()
        shapes = actor_hidden_shape, critic_hidden_shape
        hidden: dict[str, Any] = dict(zip(_HIDDEN, map(rl.Carry, shapes), strict=True))
        action = Field(action_shape, action_dtype)
        self._rows = self._make_rows(action, hidden, device=device, seed=choose_seed(seed))

    def add(
        self, observations: Any, privileged_observations: Any, actions: Any, rewards: Any, dones: Any, values: Any,
        log_probs: Any, actor_hidden_states: Any, critic_hidden_states: Any,
    ) -> None:  # fmt: skip
        """Store one step of every environment; hidden states (layers, num_envs, hidden) are those before the step."""
        hidden = map(_swap_hidden_axes, (actor_hidden_states, critic_hidden_states))
        self._store_step(observations, privileged_observations, actions, rewards, dones, values, log_probs, *hidden)

    def get_sequence_minibatches(
        self, sequence_length: int, minibatch_size: int, *, shuffle: bool = True
    ) -> Iterator[dict[str, Any]]:
        """Yield every stored step once, in minibatches of `minibatch_size` sequences `[sequence_length, B, …]`.

        Hidden states (layers, B, hidden) belong to the first step of each sequence. Without `shuffle`, sequences are
        ordered by time, then environment.
        """
        check_int("sequence_length", sequence_length, min=1, remedy="Pass a number of steps.")
        check_int("minibatch_size", minibatch_size, min=1, remedy="Pass a number of sequences.")
        if self.num_steps % sequence_length:
            expected = f"a divisor of num_steps = {self.num_steps}"
            raise ValueError(explain("sequence_length", expected, sequence_length, "Choose another length."))
        if self.step % sequence_length:
            where, expected = "get_sequence_minibatches", f"a multiple of {sequence_length} steps"
            raise NotReadyError(explain(where, expected, self.step, f"Add {-self.step % sequence_length} more."))
        for score in SCORES:
            self._rows.get_memory(score)
        return map(self._convert_batch, self._read_sequences(sequence_length, minibatch_size, shuffle))

    def _read_sequences(self, length: int, batch_size: int, shuffle: bool) -> Iterable[TensorDict]:
        core = self.core
        if shuffle:
            return core.sequences(length, batch_size=batch_size, split_episodes=False)
        # The core orders sequences by environment; sorting by "index" orders them by time, then environment.
        (all_sequences,) = core.sequences(length, split_episodes=False, shuffle=False)
        return all_sequences[all_sequences["index"].argsort()].split(batch_size)

    def _convert_batch(self, batch: TensorDict) -> dict[str, Any]:
        """Convert a batch of the core to ApexRL's names, with the time axis first."""
        hidden = {name: _swap_hidden_axes(batch.pop(name)).contiguous() for name in _HIDDEN}
        del batch["index"]
        batch.batch_size = batch["mask"].shape
        steps = batch.transpose(0, 1).contiguous()
        fields = {name: steps.get(core_name, None) for name, core_name in TRAINING_FIELDS.items()}
        return {**fields, "dones": steps["dones"], **hidden}


def _swap_hidden_axes(hidden: Any) -> Any:
    """Swap the axes of a hidden state: (layers, batch, hidden) to (batch, layers, hidden), or back."""
    if hidden is None or hidden.ndim < 2:
        return hidden
    return (hidden if isinstance(hidden, torch.Tensor) else torch.as_tensor(hidden, device="cpu")).transpose(0, 1)
