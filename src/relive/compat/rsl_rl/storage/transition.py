"""What rsl_rl's algorithms give to a storage, and what they get from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from tensordict import TensorDict

HiddenState: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...] | None
"""A recurrent state [layers, N, hidden]: a tensor of a GRU, a tuple of an LSTM."""


@dataclass(eq=False)
class Transition:
    """One step of all environments, filled field by field while it is taken."""

    observations: TensorDict | None = None
    """What the step was taken in [N, …], by observation group."""
    actions: torch.Tensor | None = None
    """[N, *actions_shape]."""
    rewards: torch.Tensor | None = None
    """[N] or [N, 1]."""
    dones: torch.Tensor | None = None
    """Whether the step ended its episode, by a time-out or otherwise: [N] or [N, 1]."""
    values: torch.Tensor | None = None
    """The critic's values of the observations [N, 1] (training type "rl")."""
    actions_log_prob: torch.Tensor | None = None
    """[N] or [N, 1] (training type "rl")."""
    distribution_params: tuple[torch.Tensor, ...] | None = None
    """The parameters of the distribution that the actions are drawn from, [N, …] each (training type "rl")."""
    privileged_actions: torch.Tensor | None = None
    """The teacher's actions [N, *actions_shape] (training type "distillation")."""
    hidden_states: tuple[HiddenState, HiddenState] = (None, None)
    """The states of the actor and the critic before the step."""

    def clear(self) -> None:
        """Forget every field."""
        self.__init__()


@dataclass(eq=False)
class Batch:
    """What one call of a generator yields; a field that the training type does not have is None."""

    observations: TensorDict | None = None
    actions: torch.Tensor | None = None
    values: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    old_actions_log_prob: torch.Tensor | None = None
    old_distribution_params: tuple[torch.Tensor, ...] | None = None
    hidden_states: tuple[HiddenState, HiddenState] = (None, None)
    masks: torch.Tensor | None = None
    privileged_actions: torch.Tensor | None = None
    dones: torch.Tensor | None = None
