# pyright: reportMissingImports=false
"""rsl_rl: `PPO.compute_returns`, and the recurrent minibatches of its `RolloutStorage`.

rsl_rl has no sequence length: a sequence is the part of an episode that a rollout has, padded to the longest part.
Minibatches are ranges of environments in a fixed order. Observations are copied and padded once per epoch; other fields
are returned as slices of the rollout, unpadded and not copied. Scalars have an axis of length 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
from rsl_rl.algorithms import PPO
from rsl_rl.storage import RolloutStorage
from tensordict import TensorDict

from relive_conformance.adapters.off_policy import NotOffered
from relive_conformance.adapters.protocol import Adapter, Array, RolloutShape, Sequences, Step, Trajectory


class RslRlRecurrent:
    """Adapter of `RolloutStorage.recurrent_mini_batch_generator`."""

    def __init__(self, shape: RolloutShape, length: int) -> None:
        self._shape = shape

    def fill(self, steps: list[Step], state: Array, advantage: Array, return_: Array) -> None:
        shape = self._shape
        like = TensorDict({"policy": torch.zeros(shape.num_envs, shape.obs_dim)}, batch_size=[shape.num_envs])
        self._storage = RolloutStorage("rl", shape.num_envs, shape.num_steps, like, (shape.action_dim,))
        for step, before in zip(steps, state, strict=True):
            obs, action, reward, value, log_prob = (
                torch.from_numpy(array) for array in (step.obs, step.action, step.reward, step.value, step.log_prob)
            )
            transition = RolloutStorage.Transition()
            transition.observations = TensorDict({"policy": obs}, batch_size=[shape.num_envs])
            transition.actions, transition.rewards = action, reward
            transition.dones = torch.from_numpy(step.terminated | step.truncated)
            transition.values, transition.actions_log_prob = value.unsqueeze(1), log_prob
            transition.distribution_params = (action,)
            transition.hidden_states = (torch.from_numpy(before).unsqueeze(0), None)
            self._storage.add_transition(transition)
        self._storage.advantages.copy_(torch.from_numpy(advantage).unsqueeze(-1))
        self._storage.returns.copy_(torch.from_numpy(return_).unsqueeze(-1))

    def minibatches(self, num_steps: int) -> Iterable[Any]:
        batches = self._shape.num_steps * self._shape.num_envs // num_steps
        return self._storage.recurrent_mini_batch_generator(batches, num_epochs=1)

    def read(self, batch: Any) -> Sequences:
        rows, masks = batch.observations["policy"][:, :, 0].long().t(), batch.masks.t()
        runs = [run[mask].tolist() for run, mask in zip(rows, masks, strict=True)]
        return Sequences(runs, batch.hidden_states[0].squeeze(0).numpy())


class RslRlGae:
    """Adapter of `PPO.compute_returns` of a filled storage, with a critic that returns the last value."""

    def prepare(self, trajectory: Trajectory, *, gamma: float, lam: float) -> Callable[[], Any]:
        if trajectory.truncated.any():
            raise NotOffered("a time-out is bootstrapped from the value of its own observation, as its PPO does")
        num_steps, num_envs = trajectory.reward.shape
        like = TensorDict({"policy": torch.zeros(num_envs, 1)}, batch_size=[num_envs])
        storage = RolloutStorage("rl", num_envs, num_steps, like, (1,))
        for name in ("reward", "value"):
            getattr(storage, f"{name}s").copy_(torch.from_numpy(getattr(trajectory, name)).unsqueeze(-1))
        storage.dones.copy_(torch.from_numpy(trajectory.ended).unsqueeze(-1))
        learner: Any = SimpleNamespace(
            storage=storage,
            critic=_Critic(torch.from_numpy(trajectory.last_value).unsqueeze(-1)),
            gamma=gamma,
            lam=lam,
            normalize_advantage_per_mini_batch=True,
        )

        def call() -> RolloutStorage:
            PPO.compute_returns(learner, like)
            return storage

        return call

    def read(self, output: Any) -> tuple[Array, Array]:
        return output.advantages.squeeze(-1).numpy(), output.returns.squeeze(-1).numpy()


class _Critic:
    """A critic that returns a constant."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value

    def __call__(self, obs: Any) -> torch.Tensor:
        return self._value

    def get_hidden_state(self) -> None:
        return None

    def reset(self, hidden_state: Any = None) -> None:
        pass


def adapter() -> Adapter:
    """Return the adapter of rsl_rl."""
    return Adapter("rsl_rl", version("rsl-rl-lib"), gae=RslRlGae, recurrent=RslRlRecurrent)
