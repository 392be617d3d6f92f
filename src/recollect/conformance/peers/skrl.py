"""skrl: `RandomMemory` and the `compute_gae` of its PPO.

Every field is [T, N, size]. Flags belong to the action, as ours do. Its estimator standardizes advantages before it
returns them, so an advantage in our sense is read as return minus value. Truncated steps are bootstrapped by adding
γ V(next) to the reward before storing (`time_limit_bootstrap`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

import torch
from skrl.agents.torch.ppo.ppo import compute_gae
from skrl.memories.torch import RandomMemory

from recollect.conformance.peers.protocol import Array, Batch, Peer, RolloutShape, Step, Trajectory

_READ = ["observations", "actions", "values", "log_prob", "advantages", "returns"]


def _column(array: Array) -> torch.Tensor:
    """[…] → […, 1]: skrl keeps an axis of length 1 for scalars."""
    return torch.from_numpy(array).unsqueeze(-1)


class SkrlGae:
    """`compute_gae`, a loop over time in torch operations."""

    def prepare(self, trajectory: Trajectory, *, gamma: float, lam: float) -> Callable[[], Any]:
        self._value = trajectory.value
        reward, value = _column(trajectory.reward_with_truncation_folded_in(gamma)), _column(trajectory.value)
        terminated, truncated = _column(trajectory.terminated), _column(trajectory.truncated)
        last_value = _column(trajectory.last_value)
        return lambda: compute_gae(
            rewards=reward,
            terminated=terminated,
            truncated=truncated,
            values=value,
            last_values=last_value,
            discount_factor=gamma,
            lambda_coefficient=lam,
            time_limit_bootstrap=True,
        )

    def read(self, output: Any) -> tuple[Array, Array]:
        return_ = output[0].squeeze(-1).numpy()
        return return_ - self._value, return_


class SkrlRollout:
    """`RandomMemory`, sampled as a whole without replacement: a shuffled epoch."""

    standardizes = True

    def __init__(self, shape: RolloutShape) -> None:
        self._rows = shape.num_steps * shape.num_envs
        self._memory = RandomMemory(memory_size=shape.num_steps, num_envs=shape.num_envs, device="cpu")
        sizes = {"observations": shape.obs_dim, "actions": shape.action_dim}
        for name in ("observations", "actions", "rewards", "log_prob", "values", "returns", "advantages"):
            self._memory.create_tensor(name, size=sizes.get(name, 1), dtype=torch.float32)
        for name in ("terminated", "truncated"):
            self._memory.create_tensor(name, size=1, dtype=torch.bool)

    def prepare(self, step: Step) -> Any:
        return {
            "observations": torch.from_numpy(step.obs),
            "actions": torch.from_numpy(step.action),
            "rewards": _column(step.reward),
            "terminated": _column(step.terminated),
            "truncated": _column(step.truncated),
            "log_prob": _column(step.log_prob),
            "values": _column(step.value),
        }

    def add(self, prepared: Any) -> None:
        self._memory.add_samples(**prepared)

    def advantage(self, last_value: torch.Tensor, last_done: Array, *, gamma: float, lam: float) -> Any:
        read = self._memory.get_tensor_by_name
        return_, advantage = compute_gae(
            rewards=read("rewards"),
            terminated=read("terminated"),
            truncated=read("truncated"),
            values=read("values"),
            last_values=last_value.unsqueeze(-1),
            discount_factor=gamma,
            lambda_coefficient=lam,
            time_limit_bootstrap=True,
        )
        self._memory.set_tensor_by_name("returns", return_)
        self._memory.set_tensor_by_name("advantages", advantage)

    def minibatches(self, batch_size: int) -> Iterable[Any]:
        # skrl counts minibatches instead of sizing them; the benchmarked sizes divide the number of rows.
        return self._memory.sample(_READ, batch_size=self._rows, mini_batches=self._rows // batch_size)

    def read(self, batch: Any) -> Batch:
        obs, action, *scalars = batch
        return Batch(obs, action, *(scalar.squeeze(-1) for scalar in scalars))

    def clear(self) -> None:
        self._memory.reset()


def peer() -> Peer:
    """skrl."""
    return Peer("skrl", version("skrl"), gae=SkrlGae, rollout=SkrlRollout)
