"""ApexRL's rollout buffer of several agents on relive's core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch

import relive as rl
from relive.compat.apexrl.buffer.rollout_buffer import PRIVILEGED, TRAINING_FIELDS, check_not_full
from relive.compat.apexrl.buffer.specs import convert_dones, list_leaves, to_dicts
from relive.compat.apexrl.utils.observation import Spec
from relive.compat.step_rows import SCORES, StepBuffer, StepRows
from relive.compat.views import WriteThroughDict, declare_spec, make_memory_views, map_tree
from relive.errors import explain
from relive.schema.checks import check_none_without_argument, check_nonempty
from relive.schema.fields import Field

_AGENT_FIELDS = {name: field for name, field in TRAINING_FIELDS.items() if name != PRIVILEGED}


class AgentTensors(WriteThroughDict):
    """A dict with one tensor `[num_steps, num_envs, …]` per agent; assigning to an agent writes into the memory."""

    def _refuse_removal(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TypeError(explain(self._where, "the tensors of every agent", "fewer", "Make a dict of your own."))

    pop = popitem = clear = setdefault = __delitem__ = _refuse_removal  # pyright: ignore[reportAssignmentType]


class MultiAgentRolloutBuffer(StepBuffer):
    """`num_steps` steps of `num_envs` environments with several agents each, and a state for all agents.

    Attributes are dicts with one tensor `[num_steps, num_envs, …]` per agent, under ApexRL's names. The tensors are
    the memory itself, and assigning one (`advantages["a"] = x`) writes into it.

    Differences from ApexRL: only stored steps are trained on; a declared state is required and an undeclared one is
    refused; nothing is broadcast; a call that raises stores nothing for any agent.

    >>> buffer = MultiAgentRolloutBuffer(possible_agents=["a", "b"], num_envs=2, num_steps=1, device="cpu",
    ...     obs_specs={"a": (3,), "b": (4,)}, action_shapes={"a": (), "b": (2,)},
    ...     action_dtypes={"a": torch.long, "b": torch.float32})
    >>> buffer.observations["b"].shape, buffer.actions["a"].dtype
    (torch.Size([1, 2, 4]), torch.int64)
    """

    observations, actions, rewards, dones = make_memory_views("obs", "action", "reward", "done")
    values, log_probs, advantages, returns = make_memory_views("value", "log_prob", *SCORES)
    (states,) = make_memory_views("state")

    def __init__(
        self, *, possible_agents: Sequence[str], num_envs: int, num_steps: int, obs_specs: Mapping[str, Spec],
        action_shapes: Mapping[str, tuple[int, ...]], action_dtypes: Mapping[str, torch.dtype],
        device: torch.device | str, state_spec: Spec | None = None,
    ) -> None:  # fmt: skip
        self.possible_agents = list(possible_agents)
        self.num_envs, self.num_steps = num_envs, num_steps
        self.obs_specs, self.state_spec = obs_specs, state_spec
        self.action_shapes, self.action_dtypes = action_shapes, action_dtypes
        scalars = declare_spec(dict.fromkeys(self.possible_agents, ()))
        state = {} if state_spec is None else {"state": declare_spec(state_spec)}
        obs = {agent: declare_spec(obs_specs[agent]) for agent in self.possible_agents}
        action = {agent: Field(action_shapes[agent], action_dtypes[agent]) for agent in self.possible_agents}
        settings: dict[str, Any] = {"reward": scalars, "value": scalars, "extra": {"done": scalars, **state}}
        make = partial(rl.RolloutBuffer, num_steps, num_envs, obs, action, device=device, **settings)
        self._rows = StepRows(make, ["obs", "action", "reward", "done", "value", "log_prob", *state])
        self.device = self._rows.tensors["terminated"].device

    def _get_memory(self, field: str) -> Any:
        memory = super()._get_memory(field)
        return memory if field == "state" else AgentTensors(field, dict(memory.items()))

    def add(
        self, *, observations: Mapping[str, Any], state: Any, actions: Mapping[str, Any], rewards: Mapping[str, Any],
        dones: Mapping[str, Any], values: Mapping[str, Any], log_probs: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Store one step of every agent in every environment; all arguments except `state` are dicts by agent."""
        rows = self._rows
        check_not_full(rows)
        if self.state_spec is None:
            check_none_without_argument("state", state, "state_spec")
        ends = {agent: convert_dones("dones", flags, self.device) for agent, flags in dones.items()}
        fields = {
            "obs": observations, "action": actions, "reward": rewards, "done": ends, "value": values,
            "log_prob": log_probs, **({} if self.state_spec is None else {"state": state}),
        }  # fmt: skip
        rows.write_step(
            [leaf for name, value in fields.items() for leaf in list_leaves(name, rows.tensors[name], value)]
        )

    def compute_returns_and_advantages(
        self, *, last_values: Mapping[str, Any], gamma: float, gae_lambda: float
    ) -> None:
        """Compute advantages and returns per agent; `last_values` [num_envs] are the values after the last step."""
        ended = map_tree(torch.Tensor.bool, self._rows.tensors["done"])
        self._rows.compute_scores(last_values, ended, gamma=gamma, lam=gae_lambda)

    def normalize_advantages(self) -> None:
        """Normalize the advantages of all agents together to mean 0 and standard deviation 1."""
        steps = check_nonempty("normalize_advantages", self.step)
        advantages = self._rows.get_memory("advantage")
        stacked = torch.stack([advantages[agent][:steps] for agent in self.possible_agents])
        for agent, normalized in zip(self.possible_agents, rl.normalize(stacked), strict=True):
            advantages[agent][:steps] = normalized

    def get_agent_data(self, agent_id: str) -> dict[str, Any]:
        """Return the stored transitions of one agent `[step · num_envs, …]`, ordered by time, then environment."""
        count = check_nonempty("get_agent_data", self.step) * self.num_envs
        rows = self._rows
        fields = {name: rows.get_flat_memory(field)[agent_id][:count] for name, field in _AGENT_FIELDS.items()}
        states = None if self.state_spec is None else rows.get_flat_memory("state")[:count]
        return {"observations": fields.pop("observations"), "states": states, **fields}

    def clear(self) -> None:
        """Remove the stored steps."""
        self._rows.clear()

    def get_state_dict(self) -> dict[str, Any]:
        """Return `step` and all tensors in plain dicts; the tensors share the buffer's memory."""
        names = ("observations", "actions", "rewards", "dones", "values", "log_probs", "advantages", "returns")
        tensors = {name: {agent: to_dicts(x) for agent, x in getattr(self, name).items()} for name in names}
        return {**tensors, "states": to_dicts(self.states), "step": self.step}
