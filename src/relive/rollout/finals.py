"""The states that truncated steps led to, kept until somebody asks what they were worth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from gymnasium.vector import AutoresetMode

from relive.fields.autoreset import final_rows, observation
from relive.fields.batch import assemble
from relive.fields.conversion import dotted
from relive.fields.invariants import require, require_form
from relive.fields.schema import Field, Schema, given_shape


class Found(NamedTuple):
    """The final observations of one step: of which environments, and their leaves [K, …]."""

    step: int
    envs: list[int]
    leaves: list[torch.Tensor]


class Finals:
    """The true final observations of one rollout, in the order of t·N + n."""

    def __init__(self, schema: Schema, lead: tuple[int, ...], device: torch.device) -> None:
        self._schema, self._lead, self._device = schema, lead, device
        self._found: list[Found] = []

    def among(self, step: int, obs: Any, envs: list[int]) -> Found | None:
        """The rows `envs` of an observation of all environments; the whole of it is checked, nothing is kept yet."""
        rows = envs if self._lead else None
        leaves = observation(self._schema, obs, self._lead, self._device, rows=rows)
        return self._of(step, envs, leaves)

    def of_step(self, step: int, parts: tuple[Any, ...], envs: list[int], mode: AutoresetMode | None) -> Found | None:
        """Those of the environments `envs`, found where this mode leaves them in what `env.step` returned."""
        if not envs:
            return None
        if mode is AutoresetMode.SAME_STEP:
            return self._in_info(step, parts[4], envs)
        return self.among(step, parts[0], envs)

    def _in_info(self, step: int, info: Mapping[str, Any], envs: list[int]) -> Found | None:
        """Those of the environments `envs` that the info of a step holds."""
        return self._of(step, *final_rows(info, envs, self._schema, self._lead, self._device))

    def _of(self, step: int, envs: list[int], leaves: list[torch.Tensor]) -> Found | None:
        if not envs:
            return None
        return Found(step, envs, leaves if self._lead else [leaf.unsqueeze(0).clone() for leaf in leaves])

    def keep(self, found: Found) -> None:
        """Make what was found part of the rollout."""
        self._found.append(found)

    def clear(self) -> None:
        """Forget them."""
        self._found = []

    def check(self, cut: torch.Tensor) -> None:
        """Verify that each is of a truncated step (`cut` [T, N]) and stands where it belongs."""
        for found in self._found:
            for i, leaf in zip(self._schema.columns["obs"], found.leaves, strict=True):
                field, where = self._schema.fields[i], f"final_{dotted(self._schema.paths[i])} of step {found.step}"
                require_form(where, leaf, (len(found.envs), *given_shape(field)), field.dtype, self._device)
        places = self.places
        require(places == sorted(set(places)), "final_obs", "one for each (step, environment), in order", places)
        if cut.device.type == "meta":  # which has no values to look at
            return
        truncated = set(map(tuple, cut.nonzero().tolist())) if places else set()
        wrong = [place for place in places if place not in truncated]
        require(not wrong, "final_obs", "(step, environment) of truncated steps", wrong)

    @property
    def places(self) -> list[tuple[int, int]]:
        """(step, environment) of each."""
        return [(found.step, env) for found in self._found for env in found.envs]

    @property
    def obs(self) -> Any:
        """All of them: a tensor [K, …], or a TensorDict [K] of a nested observation."""
        columns = self._schema.columns["obs"]
        leaves = [
            torch.cat([self._nothing(self._schema.fields[column]), *(found.leaves[i] for found in self._found)])
            for i, column in enumerate(columns)
        ]
        if isinstance(self._schema.trees["obs"], Field):
            return leaves[0]
        paths = [self._schema.paths[i][1:] for i in columns]
        return assemble(dict(zip(paths, leaves, strict=True)), leaves[0].shape[:1])

    def _nothing(self, field: Field) -> torch.Tensor:
        return torch.empty((0, *given_shape(field)), dtype=field.dtype, device=self._device)
