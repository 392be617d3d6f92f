"""ApexRL's rollout buffer on ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict

import relive as rl
from relive.compat.apexrl.attributes import SCORES, Column, plain, training_data
from relive.compat.apexrl.specs import Spec, declared, ended, inferred, placed, written
from relive.errors import SchemaError, explain
from relive.fields.schema import Field, positive
from relive.randomness import Randomness

PRIVILEGED = "privileged_observations"
_GIVEN = ("observations", PRIVILEGED, "actions", "rewards", "dones", "values", "log_probs")
_SCORES = ("advantages", "returns")


class RolloutBuffer:
    """`num_steps` steps of `num_envs` environments under ApexRL's names.

    Both of its constructors work: the documented one, `(num_envs, num_steps, obs_shape, device, num_privileged_obs=0)`,
    where the first `add` says what an action is, and the newer one, which is told. `num_privileged_obs` alone declares
    a vector of privileged observations, as documented. `seed` makes `get_minibatch` repeatable; ApexRL draws from the
    global generator, we do not.

    What is different here:
    - Only stored steps are trained on: a rollout that is partly filled has `len(buffer)` rows in `get_all_data` and
      `get_minibatch`, and `last_values` follow its last step. (There, zeros and rows of older rollouts are among them.)
    - Privileged observations that are declared must be given, and those that are not declared are refused. (There, the
      row of an older rollout stays, or what is given is dropped.)
    - Nothing is broadcast, and actions are never rounded to another dtype.
    - An environment that steps in place has overwritten `obs` when `add` is called: `stage` copies it before the step.

    >>> buffer = RolloutBuffer(num_envs=2, num_steps=1, obs_shape=(3,), device="cpu")
    >>> ones = torch.ones(2)
    >>> buffer.add(torch.zeros(2, 3), None, ones, rewards=ones, dones=ones, values=0 * ones, log_probs=-ones)
    >>> buffer.compute_returns_and_advantages(last_values=ones)
    >>> buffer.get_all_data()["advantages"]
    tensor([1., 1.])
    """

    observations = Column("obs")
    privileged_observations = Column(PRIVILEGED)
    actions = Column("action")
    rewards = Column("reward")
    dones = Column("terminated")
    values = Column("value")
    log_probs = Column("log_prob")
    advantages = Column("advantage")
    returns = Column("return")

    def __init__(
        self,
        num_envs: int,
        num_steps: int,
        obs_shape: Spec,
        action_shape: tuple[int, ...] | torch.device | str | None = None,
        action_dtype: torch.dtype | int | None = None,
        device: torch.device | str = "cpu",
        num_privileged_obs: int = 0,
        privileged_obs_shape: Spec | None = None,
        *,
        seed: int | None = None,
    ) -> None:
        if isinstance(action_shape, str | torch.device):  # the documented order: device, num_privileged_obs
            device, action_shape = action_shape, None
        if isinstance(action_dtype, int):
            num_privileged_obs, action_dtype = action_dtype, None
        self.num_envs = num_envs
        self.num_steps = num_steps
        self.obs_shape = obs_shape
        self.num_privileged_obs = num_privileged_obs
        self.privileged_obs_shape = privileged_obs_shape
        if privileged_obs_shape is None and num_privileged_obs:
            self.privileged_obs_shape = (positive("num_privileged_obs", num_privileged_obs),)
        self._told = action_shape, action_dtype
        self._is_settled = None not in self._told
        self._random = Randomness(seed)
        self.core = self._made(Field(action_shape or (), action_dtype or torch.float32), device)

    def _made(self, action: Field, device: torch.device | str) -> rl.RolloutBuffer:
        extra = {PRIVILEGED: declared(self.privileged_obs_shape)} if self.privileged_obs_shape is not None else None
        return rl.RolloutBuffer(
            self.num_steps, self.num_envs, declared(self.obs_shape), action, extra=extra, device=device
        )

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.core.device

    @property
    def action_shape(self) -> tuple[int, ...]:
        """The shape of one action; `()` before the first `add` where the constructor was not told."""
        return tuple(self.actions.shape[2:])

    @property
    def action_dtype(self) -> torch.dtype:
        """The dtype of actions; float32 before the first `add` where the constructor was not told."""
        return self.actions.dtype

    @property
    def step(self) -> int:
        """How many steps are stored."""
        return self.core.num_stored

    def __len__(self) -> int:
        """How many transitions are stored."""
        return len(self.core)

    def stage(self, observations: Any, privileged_observations: Any, actions: Any) -> None:
        """Copy what is known before the step, for environments that step in place.

        Then `add(None, None, None, rewards, dones, values, log_probs)`. This is the buffer's own, not ApexRL's.
        """
        core = self._settled(actions)
        core.stage(**observed(self, observations, privileged_observations), action=placed(None, actions, core.device))
        self.core, self._is_settled = core, True

    def add(
        self,
        observations: Any,
        privileged_observations: Any,
        actions: Any,
        rewards: Any,
        dones: Any,
        values: Any,
        log_probs: Any,
    ) -> None:
        """Store one step of every environment; `dones` [num_envs] says whether this step ended an episode."""
        core = self._settled(actions)
        core.add(
            **observed(self, observations, privileged_observations),
            **outcome(core.device, actions, rewards, dones, values, log_probs),
        )
        self.core, self._is_settled = core, True

    def _settled(self, actions: Any) -> rl.RolloutBuffer:
        """The core that stores such actions: the first ones tell, where the constructor did not."""
        refuse_full(self.core)
        if self._is_settled:
            return self.core
        action = inferred(actions, 1, *self._told)
        is_same = action == Field(self.action_shape, self.action_dtype)
        return self.core if is_same else self._made(action, self.device)

    def compute_returns_and_advantages(self, last_values: Any, gamma: float = 0.99, gae_lambda: float = 0.95) -> None:
        """Advantages and returns of the stored steps; `last_values` [num_envs] are of the observations after them.

        An episode that a time limit cut off counts as ended: add the discounted value of its final observation to its
        last reward, as ApexRL's own runner does.
        """
        self.core.compute_advantage(placed(None, last_values, self.device), gamma=gamma, lam=gae_lambda)

    def get_all_data(self) -> dict[str, Any]:
        """All stored transitions `[len(buffer), …]` in the order of time, then environment; they share the memory."""
        return training_data(self.core.data.reshape(-1))

    def get_minibatch(self, batch_size: int) -> tuple[Any, ...]:
        """Transitions drawn with replacement: what `get_all_data` has, in its order, as a tuple."""
        rows = self.core.data.reshape(-1)
        total = torch.tensor(len(rows), device=self.device)
        return tuple(training_data(rows[self._random.below(total, positive("batch_size", batch_size))]).values())

    def state_dict(self) -> dict[str, Any]:
        """The stored steps as tensors, dicts and numbers only: `torch.load(…, weights_only=True)` reads them."""
        held = {name: getattr(self, name) for name in (*_GIVEN, *_SCORES)}
        rows = {name: rows if rows is None else plain(rows[: self.step].clone()) for name, rows in held.items()}
        return {"step": self.step, **self._layout(), **rows}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Hold what `state_dict` of a buffer of the same layout held; an error leaves the buffer as it was."""
        for name, own in self._layout().items():
            if state_dict[name] != own:
                raise ValueError(f"RolloutBuffer {name} mismatch: {state_dict[name]} != {own}")
        twin = RolloutBuffer(
            self.num_envs, self.num_steps, self.obs_shape, *self._told, self.device,
            self.num_privileged_obs, self.privileged_obs_shape,
        )  # fmt: skip
        rows = TensorDict(
            {name: state_dict[name] for name in _GIVEN if state_dict[name] is not None}, state_dict["step"]
        )
        for row in rows:
            twin.add(**{name: row.get(name, None) for name in _GIVEN})
        for score in _SCORES if len(twin) else ():
            setattr(twin, score, state_dict[score].to(self.device))
        self.core, self._is_settled = twin.core, twin._is_settled

    def _layout(self) -> dict[str, Any]:
        specs = {name: written(getattr(self, name)) for name in ("obs_shape", "privileged_obs_shape")}
        return {"num_envs": self.num_envs, "num_steps": self.num_steps, **specs}

    def clear(self) -> None:
        """Forget the stored steps."""
        self.core.clear()

    def to(self, device: torch.device | str) -> RolloutBuffer:
        """Move the stored steps to another device; returns the buffer itself."""
        self.core = refilled(self._made(Field(self.action_shape, self.action_dtype), device), self.core)
        return self


def refuse_full(core: rl.RolloutBuffer) -> None:
    """ApexRL's error for a step too many."""
    if core.is_full:
        raise ValueError(f"Rollout buffer is full (capacity: {core.num_steps})")


def refilled(fresh: rl.RolloutBuffer, core: rl.RolloutBuffer) -> rl.RolloutBuffer:
    """An empty buffer of the same fields, on whatever device, with the stored steps of another one."""
    rows = core.columns.to(fresh.device)
    scores = {name: rows.pop(name)[: core.num_stored] for name in SCORES if name in rows.keys()}
    fresh.columns.update_(rows)
    fresh.take_back(core.num_stored)
    if scores:
        fresh.attach(scores)
    return fresh


def observed(buffer: Any, observations: Any, privileged_observations: Any) -> dict[str, Any]:
    """What was seen in a step, for the core."""
    seen = {"obs": placed(buffer.obs_shape, observations, buffer.device)}
    if buffer.privileged_obs_shape is not None:
        seen[PRIVILEGED] = placed(buffer.privileged_obs_shape, privileged_observations, buffer.device)
    elif privileged_observations is not None:
        remedy = "Make the buffer with privileged_obs_shape=."
        got = type(privileged_observations).__name__
        raise SchemaError(explain(PRIVILEGED, "None without privileged_obs_shape", got, remedy))
    return seen


def outcome(
    device: torch.device, actions: Any, rewards: Any, dones: Any, values: Any, log_probs: Any
) -> dict[str, Any]:
    """What was done in a step and what came of it, for the core."""
    step = {"action": actions, "reward": rewards, "value": values, "log_prob": log_probs}
    ends = ended(dones, device)
    return {
        **{name: placed(None, value, device) for name, value in step.items()},
        "terminated": ends,
        "truncated": torch.zeros_like(ends),
    }
