# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# If the library is missing, pyright resolves its name to this file.
"""TorchRL: `TensorDictReplayBuffer` with its samplers and transforms, and `generalized_advantage_estimate`.

Transitions are TensorDicts whose consequences are under "next", scalars with an axis of length 1. Rows of several
environments are extended into one ring. Prioritized sampling is native code, which loads only beside the torch that
the release was built for: 2.14.1 for TorchRL 0.14.1.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import (
    HERReplayBuffer,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    Sequence,
    SliceSampler,
    TensorDictReplayBuffer,
)
from torchrl.envs.transforms import CatFrames, MultiStepTransform
from torchrl.objectives.value.functional import generalized_advantage_estimate

from relive_conformance.adapters.off_policy import (
    ALPHA,
    BETA,
    GoalBatch,
    GoalStep,
    NotOffered,
    ReplayBatch,
    ReplayShape,
    Transitions,
    drop_unit_axis,
    goal_reward,
)
from relive_conformance.adapters.protocol import Adapter, Array, Trajectory

# TorchRL logs a message for every storage.
logging.getLogger("torchrl").setLevel(logging.WARNING)


class TorchRlGae:
    """Adapter of `generalized_advantage_estimate`, whose time axis is the last but one."""

    def prepare(self, trajectory: Trajectory, *, gamma: float, lam: float) -> Callable[[], Any]:
        def column(array: Array) -> torch.Tensor:
            return torch.from_numpy(array.T.copy()).unsqueeze(-1)

        value, next_value, reward = map(column, (trajectory.value, trajectory.next_value, trajectory.reward))
        done, terminated = column(trajectory.ended), column(trajectory.terminated)
        return lambda: generalized_advantage_estimate(gamma, lam, value, next_value, reward, done, terminated)

    def read(self, output: Any) -> tuple[Array, Array]:
        advantage, return_ = (leaf.squeeze(-1).T.numpy() for leaf in output)
        return advantage, return_


class TorchRlReplay:
    """Adapter of `TensorDictReplayBuffer` on a `LazyTensorStorage`, with a seeded generator."""

    default_seed = "without a generator draws come from torch's global one, as documented"
    _kind: type[ReplayBuffer] = TensorDictReplayBuffer

    def __init__(self, shape: ReplayShape, **options: Any) -> None:
        generator = None if shape.seed is None else torch.Generator().manual_seed(shape.seed)
        self._buffer = self._kind(
            storage=LazyTensorStorage(shape.capacity),
            sampler=self._sampler(shape),
            generator=generator,
            batch_size=32,
            **options,
        )

    def _sampler(self, shape: ReplayShape) -> Any:
        return RandomSampler()

    def prepare(self, step: Transitions) -> Any:
        return _steps(step, len(step))

    def raw(self, step: Transitions) -> Any:
        return _steps(step, len(step.action))

    def add(self, prepared: Any) -> None:
        self._buffer.extend(prepared)

    def fill(self, block: Transitions) -> None:
        self._buffer.extend(self.prepare(block))

    extend = fill

    def clear(self) -> None:
        self._buffer.empty()

    def save(self, path: str) -> None:
        self._buffer.dumps(path)

    def load(self, path: str) -> None:
        self._buffer.loads(path)

    def sample(self, batch_size: int) -> Any:
        return self._buffer.sample(batch_size)

    def read(self, batch: Any) -> ReplayBatch:
        after = batch["next"]
        return ReplayBatch(
            obs=batch["observation"].numpy(),
            action=batch["action"].numpy(),
            reward=drop_unit_axis(after["reward"]),
            terminated=drop_unit_axis(after["terminated"]),
            next_obs=after["observation"].numpy(),
        )

    @property
    def stored(self) -> int:
        return len(self._buffer)

    @property
    def nbytes(self) -> int:
        return self._buffer.storage._storage.bytes()


def _steps(step: Transitions, rows: int) -> TensorDict:
    def column(array: Array) -> torch.Tensor:
        tensor = torch.as_tensor(array)
        return tensor.unsqueeze(-1) if tensor.ndim == 1 else tensor

    flags = {name: column(getattr(step, name)) for name in ("terminated", "truncated")}
    following = {"observation": torch.as_tensor(step.next_obs), "reward": column(step.reward), **flags}
    following["done"] = flags["terminated"] | flags["truncated"]
    obs, action = torch.as_tensor(step.obs), torch.as_tensor(step.action)
    return TensorDict({"observation": obs, "action": action, "next": TensorDict(following, [rows])}, [rows])


class TorchRlReplayWithoutReplacement(TorchRlReplay):
    """Adapter of `SamplerWithoutReplacement`."""

    fewer_is_documented = "the last batch of an epoch may be smaller, unless drop_last is set"

    def _sampler(self, shape: ReplayShape) -> Any:
        return SamplerWithoutReplacement()


class TorchRlPrioritized(TorchRlReplay):
    """Adapter of `PrioritizedSampler`, whose priorities are float32 by default."""

    extend = None

    def _sampler(self, shape: ReplayShape) -> Any:
        return PrioritizedSampler(shape.capacity, ALPHA, BETA)

    def read(self, batch: Any) -> ReplayBatch:
        return super().read(batch)._replace(weight=drop_unit_axis(batch["priority_weight"]))

    def priority(self, values: Array) -> torch.Tensor:
        return torch.from_numpy(values).float()

    def update(self, batch: Any, priority: torch.Tensor) -> None:
        self._buffer.update_priority(batch["index"], priority)

    def handles(self, batch: Any) -> Array:
        return batch["index"].numpy()

    def set_priority(self, handles: Array, priority: Array) -> None:
        self._buffer.update_priority(torch.from_numpy(handles), self.priority(priority))


class TorchRlNStep(TorchRlReplay):
    """Adapter of `MultiStepTransform` in the buffer; it writes the discount under "gamma"."""

    extend = None
    flags_of_first_step = "flags are documented to stay those of a window's first step"

    def __init__(self, shape: ReplayShape, n: int, gamma: float) -> None:
        if shape.num_envs > 1:
            raise NotOffered("n-step transitions of one environment in one ring only")
        super().__init__(shape, transform=MultiStepTransform(n_steps=n, gamma=gamma))

    def read(self, batch: Any) -> ReplayBatch:
        return super().read(batch)._replace(discount=drop_unit_axis(batch["gamma"]))


class TorchRlSequence(TorchRlReplay):
    """Adapter of `SliceSampler`, which reads the ends of episodes from "done"."""

    def __init__(self, shape: ReplayShape, length: int) -> None:
        if shape.num_envs > 1:
            raise NotOffered("sequences of one environment in one ring only")
        self._length = length
        super().__init__(shape)

    def _sampler(self, shape: ReplayShape) -> Any:
        return SliceSampler(slice_len=self._length, end_key=("next", "done"), strict_length=True)

    def sample(self, batch_size: int) -> Any:
        return self._buffer.sample(batch_size * self._length)

    def read(self, batch: Any) -> ReplayBatch:
        steps = super().read(batch)[:5]
        return ReplayBatch(*(leaf.reshape(-1, self._length, *leaf.shape[1:]) for leaf in steps if leaf is not None))


class TorchRlBurnIn(TorchRlReplay):
    """Adapter of sampling by `Sequence`, in which steps before the first step of an episode are marked invalid."""

    def __init__(self, shape: ReplayShape, burn_in: int, length: int) -> None:
        self._length = burn_in + length
        super().__init__(shape, sample_unit=Sequence(length, burn_in=burn_in))

    def read(self, batch: Any) -> ReplayBatch:
        steps = (*super().read(batch)[:5], batch["validity_mask"].numpy())
        *leaves, mask = (leaf.reshape(-1, self._length, *leaf.shape[1:]) for leaf in steps if leaf is not None)
        return ReplayBatch(*leaves, mask=mask)


class TorchRlStacked(TorchRlReplay):
    """Adapter of `CatFrames`: frames [1, H, W] are stored, and stacked when rows are drawn."""

    _kind = ReplayBuffer

    def __init__(self, shape: ReplayShape) -> None:
        frames = CatFrames(shape.obs[-1], dim=-3, in_keys=["observation"], out_keys=["stack"], reset_key="_reset")
        transform, self._slices = frames.make_rb_transform_and_sampler(32, end_key=("next", "done"))
        super().__init__(shape, transform=transform)

    def _sampler(self, shape: ReplayShape) -> Any:
        return self._slices

    def prepare(self, step: Transitions) -> Any:
        steps = super().prepare(step)
        for key in ("observation", ("next", "observation")):
            steps[key] = steps[key][..., -1].unsqueeze(1)
        return steps

    def read(self, batch: Any) -> ReplayBatch:
        obs, next_obs = (batch[key].movedim(1, -1).numpy() for key in ("stack", ("next", "stack")))
        return super().read(batch)._replace(obs=obs, next_obs=next_obs)


class TorchRlHindsight:
    """Adapter of `HERReplayBuffer`, with the next state as the achieved goal."""

    def __init__(self, capacity: int, strategy: str) -> None:
        self._buffer = HERReplayBuffer(
            lambda batch: torch.from_numpy(goal_reward(batch["next", "achieved_goal"], batch["desired_goal"])),
            strategy=strategy,
            achieved_goal_key=("next", "achieved_goal"),
            storage=LazyTensorStorage(capacity),
            batch_size=16,
        )

    def add(self, step: GoalStep) -> None:
        def number(value: float) -> torch.Tensor:
            return torch.tensor([value], dtype=torch.float32)

        done, terminated = torch.tensor([step.terminated or step.truncated]), torch.tensor([step.terminated])
        following = {"achieved_goal": number(step.next_at), "reward": number(step.reward)}
        following |= {"done": done, "terminated": terminated}
        at, goal = number(step.at), number(step.goal)
        self._buffer.add(TensorDict({"achieved_goal": at, "desired_goal": goal, "next": following}))

    def sample(self, batch_size: int) -> GoalBatch:
        batch = self._buffer.sample(batch_size)
        columns = batch["achieved_goal"], batch["desired_goal"], batch["next", "achieved_goal"], batch["next", "reward"]
        return GoalBatch(*(drop_unit_axis(column) for column in columns))


def adapter() -> Adapter:
    """Return the adapter of TorchRL; raise an ImportError if the native part of TorchRL cannot be loaded."""
    try:
        PrioritizedSampler(1, ALPHA, BETA)
    except RuntimeError as error:
        raise ImportError(f"the native part of TorchRL does not load with torch {torch.__version__}") from error
    return Adapter(
        "TorchRL",
        version("torchrl"),
        gae=TorchRlGae,
        replay=TorchRlReplay,
        without_replacement=TorchRlReplayWithoutReplacement,
        prioritized=TorchRlPrioritized,
        n_step=TorchRlNStep,
        sequence=TorchRlSequence,
        burn_in=TorchRlBurnIn,
        stacked=TorchRlStacked,
        hindsight=TorchRlHindsight,
    )
