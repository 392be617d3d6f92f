"""ApexRL's rollout buffer of several agents on one of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import relive as rl
from relive.compat.apexrl.attributes import SCORES, TRAINING, Column, plain, read
from relive.compat.apexrl.rollout import PRIVILEGED, refuse_full
from relive.compat.apexrl.specs import Spec, declared, ended, placed
from relive.errors import SchemaError, explain
from relive.fields.conversion import conform
from relive.fields.schema import Field

_TRAINING = {theirs: ours for theirs, ours in TRAINING.items() if ours != PRIVILEGED}


class AgentColumn:
    """An attribute that is a dict of one tensor `[num_steps, num_envs, …]` for each agent."""

    def __init__(self, field: str) -> None:
        self._field = field

    def __get__(self, buffer: Any, owner: type) -> Any:
        return self if buffer is None else dict(read(buffer.core.columns, self._field).items())


class MultiAgentRolloutBuffer:
    """`num_steps` steps of `num_envs` environments with several agents each, and a state that they share.

    Attributes are dicts of one tensor `[num_steps, num_envs, …]` for each agent, under ApexRL's names. They share the
    memory; only `dones` is a copy, which is a float there and a bool here.

    What is different here: only stored steps are trained on; a state that is declared must be given and one that is not
    is refused; nothing is broadcast; a call that fails has stored nothing of any agent.

    >>> buffer = MultiAgentRolloutBuffer(possible_agents=["a", "b"], num_envs=2, num_steps=1, device="cpu",
    ...     obs_specs={"a": (3,), "b": (4,)}, action_shapes={"a": (), "b": (2,)},
    ...     action_dtypes={"a": torch.long, "b": torch.float32})
    >>> buffer.observations["b"].shape, buffer.actions["a"].dtype
    (torch.Size([1, 2, 4]), torch.int64)
    """

    observations = AgentColumn("obs")
    actions = AgentColumn("action")
    rewards = AgentColumn("reward")
    dones = AgentColumn("done")
    values = AgentColumn("value")
    log_probs = AgentColumn("log_prob")
    advantages = AgentColumn("advantage")
    returns = AgentColumn("return")
    states = Column("state")

    def __init__(
        self,
        *,
        possible_agents: Sequence[str],
        num_envs: int,
        num_steps: int,
        obs_specs: Mapping[str, Spec],
        action_shapes: Mapping[str, tuple[int, ...]],
        action_dtypes: Mapping[str, torch.dtype],
        device: torch.device | str,
        state_spec: Spec | None = None,
    ) -> None:
        self.possible_agents = list(possible_agents)
        self.num_envs = num_envs
        self.num_steps = num_steps
        self.obs_specs = obs_specs
        self.action_shapes = action_shapes
        self.action_dtypes = action_dtypes
        self.state_spec = state_spec
        self._each = dict.fromkeys(self.possible_agents, ())
        extra = {"done": declared(self._each, torch.bool)}
        self.core = rl.RolloutBuffer(
            num_steps,
            num_envs,
            {agent: declared(obs_specs[agent]) for agent in self.possible_agents},
            {agent: Field(action_shapes[agent], action_dtypes[agent]) for agent in self.possible_agents},
            reward=declared(self._each),
            value=declared(self._each),
            extra=extra if state_spec is None else {**extra, "state": declared(state_spec)},
            device=device,
        )

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.core.device

    @property
    def step(self) -> int:
        """How many steps are stored."""
        return self.core.num_stored

    def add(
        self,
        *,
        observations: Mapping[str, Any],
        state: Any,
        actions: Mapping[str, Any],
        rewards: Mapping[str, Any],
        dones: Mapping[str, Any],
        values: Mapping[str, Any],
        log_probs: Mapping[str, Any],
    ) -> None:
        """Store one step of every agent in every environment; all but `state` are dicts of one entry for each agent."""
        refuse_full(self.core)
        device, never = self.device, torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        self.core.add(
            placed(self.obs_specs, observations, device),
            placed(self.action_shapes, actions, device),
            placed(self._each, rewards, device),
            never,
            never,
            value=placed(self._each, values, device),
            log_prob=placed(self._each, log_probs, device),
            done={agent: ended(flags, device) for agent, flags in dones.items()},
            **self._shared(state),
        )

    def _shared(self, state: Any) -> dict[str, Any]:
        if self.state_spec is not None:
            return {"state": placed(self.state_spec, state, self.device)}
        if state is not None:
            remedy = "Make the buffer with state_spec=."
            raise SchemaError(explain("state", "None without state_spec", type(state).__name__, remedy))
        return {}

    def compute_returns_and_advantages(
        self, *, last_values: Mapping[str, Any], gamma: float, gae_lambda: float
    ) -> None:
        """Advantages and returns of the stored steps, each agent's by its own ends; `last_values` follow them."""
        rows = self.core.data
        scores: dict[str, dict[str, torch.Tensor]] = {name: {} for name in SCORES}
        for agent in self.possible_agents:
            reward, value, done = (rows[name, agent] for name in ("reward", "value", "done"))
            last = placed(None, last_values[agent], self.device)
            last = conform(f"last_values.{agent}", Field(), last, (self.num_envs,), self.device)
            next_value = torch.cat([value[1:], last.unsqueeze(0)])
            found = rl.gae(reward, value, next_value, done, torch.zeros_like(done), gamma=gamma, lam=gae_lambda)
            for name, score in zip(SCORES, found, strict=True):
                scores[name][agent] = score
        self.core.attach(scores)

    def normalize_advantages(self) -> None:
        """Give the advantages of all agents together mean 0 and standard deviation 1."""
        together = torch.stack(list(read(self.core.data, "advantage").values()))
        self.core.attach(advantage=dict(zip(self.possible_agents, rl.normalize(together), strict=True)))

    def get_agent_data(self, agent_id: str) -> dict[str, Any]:
        """The stored transitions of one agent `[step · num_envs, …]`, in the order of time, then environment."""
        rows = self.core.data.reshape(-1)
        found = {theirs: read(rows, ours)[agent_id] for theirs, ours in _TRAINING.items()}
        return {"observations": found.pop("observations"), "states": read(rows, "state"), **found}

    def clear(self) -> None:
        """Forget the stored steps."""
        self.core.clear()

    def get_state_dict(self) -> dict[str, Any]:
        """Everything in plain dicts of tensors that share the memory, and `step`."""
        names = ("observations", "actions", "rewards", "dones", "values", "log_probs", "advantages", "returns")
        tensors = {name: {agent: plain(x) for agent, x in getattr(self, name).items()} for name in names}
        return {**tensors, "states": plain(self.states), "step": self.step}
