# pyright: reportMissingImports=false
"""skrl: `RandomMemory` and the `compute_gae` of its PPO.

Every field is [T, N, size]. Flags belong to the action, as ours do. Its estimator standardizes advantages before it
returns them, so an advantage in our sense is read as return minus value. Truncated steps are bootstrapped by adding
γ V(next) to the reward before storing (`time_limit_bootstrap`).

As a replay buffer it draws with replacement: without, which is its default, it shuffles all rows for each batch. Images
are stored flat. Its sequences run through ends of episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from skrl.agents.torch.ppo.ppo import compute_gae
from skrl.memories.torch import RandomMemory

from relive_conformance.adapters.off_policy import ReplayBatch, ReplayShape, Transitions, drop_unit_axis
from relive_conformance.adapters.protocol import Adapter, Array, Batch, RolloutShape, Step, Trajectory

_FIELDS = ["observations", "actions", "rewards", "terminated", "truncated", "next_observations"]
_LEARNED = [name for name in _FIELDS if name != "truncated"]
_READ = ["observations", "actions", "values", "log_prob", "advantages", "returns"]


def _column(array: Array) -> torch.Tensor:
    """Append an axis of length 1, as skrl stores scalars."""
    return torch.from_numpy(array).unsqueeze(-1)


class SkrlGae:
    """Adapter of `compute_gae`, a loop over time in torch operations."""

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
    """Adapter of `RandomMemory`; an epoch is a draw of all rows without replacement."""

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


class SkrlReplay:
    """Adapter of `RandomMemory(replacement=True)`, with a tensor per field."""

    draws_from = "draws come from torch's global generator, which set_seed seeds"
    replacement = True

    def __init__(self, shape: ReplayShape) -> None:
        self._shape = shape
        size, again = shape.capacity // shape.num_envs, self.replacement
        self._memory = RandomMemory(memory_size=size, num_envs=shape.num_envs, device="cpu", replacement=again)
        obs_size, obs_dtype = int(np.prod(shape.obs)), torch.uint8 if shape.is_image else torch.float32
        for name in ("observations", "next_observations"):
            self._memory.create_tensor(name, size=obs_size, dtype=obs_dtype)
        self._memory.create_tensor("actions", size=shape.action_dim, dtype=torch.float32)
        self._memory.create_tensor("rewards", size=1, dtype=torch.float32)
        for name in ("terminated", "truncated"):
            self._memory.create_tensor(name, size=1, dtype=torch.bool)

    def prepare(self, step: Transitions) -> Any:
        arrays = step.obs, step.action, step.reward, step.terminated, step.truncated, step.next_obs
        return {name: torch.from_numpy(a.reshape(len(step), -1)) for name, a in zip(_FIELDS, arrays, strict=True)}

    def add(self, prepared: Any) -> None:
        self._memory.add_samples(**prepared)

    def fill(self, block: Transitions) -> None:
        # For several steps, add_samples would advance its index with every field, so that fields get out of step.
        memory = self._memory
        rows = slice(memory.memory_index, memory.memory_index + len(block))
        for name, tensor in self.prepare(block).items():
            memory.tensors[name][rows, 0] = tensor
        memory.filled |= rows.stop == memory.memory_size
        memory.memory_index = rows.stop % memory.memory_size

    def extend(self, block: Transitions) -> None:
        self._memory.add_samples(**self.prepare(block))

    def clear(self) -> None:
        self._memory.reset()

    def save(self, path: str) -> None:
        self._memory.save(path)

    def load(self, path: str) -> None:
        (file,) = Path(path, "memories").iterdir()
        self._memory.load(str(file))

    def sample(self, batch_size: int) -> Any:
        return self._memory.sample(_LEARNED, batch_size=batch_size)[0]

    def read(self, batch: Any) -> ReplayBatch:
        obs, action, reward, terminated, next_obs = batch
        obs, next_obs = (leaf.numpy().reshape(-1, *self._shape.obs) for leaf in (obs, next_obs))
        return ReplayBatch(obs, action.numpy(), drop_unit_axis(reward), drop_unit_axis(terminated), next_obs)

    @property
    def stored(self) -> int:
        return len(self._memory)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._memory.tensors.values()) + self._memory.all_sequence_indexes.nbytes


class SkrlReplayWithoutReplacement(SkrlReplay):
    """Adapter of `RandomMemory` without replacement, its default."""

    fewer_is_documented = "without replacement a batch has at most as many rows as are stored"
    replacement = False


class SkrlSequence(SkrlReplay):
    """Adapter of `RandomMemory`, sampled as sequences."""

    crosses_episodes = "sequences come with their flags, and models start anew where an episode ended"

    def __init__(self, shape: ReplayShape, length: int) -> None:
        super().__init__(shape)
        self._length = length

    def sample(self, batch_size: int) -> Any:
        return self._memory.sample(_LEARNED, batch_size=batch_size, sequence_length=self._length)[0]

    def read(self, batch: Any) -> ReplayBatch:
        steps = super().read(batch)[:5]
        return ReplayBatch(*(leaf.reshape(-1, self._length, *leaf.shape[1:]) for leaf in steps))


def adapter() -> Adapter:
    """Return the adapter of skrl."""
    unchecked = "documented: no check is performed for the compatibility of shapes"
    return Adapter(
        "skrl",
        version("skrl"),
        gae=SkrlGae,
        rollout=SkrlRollout,
        replay=SkrlReplay,
        without_replacement=SkrlReplayWithoutReplacement,
        sequence=SkrlSequence,
        notes={"T27": unchecked, "T28": unchecked},
    )
