"""The meaning of a rollout's flags: rows that end an episode, start one or only reset, and final observations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from gymnasium.vector import AutoresetMode

from relive import kernels
from relive.checkpoint.snapshot import SnapshotReader, State
from relive.errors import SchemaError, explain
from relive.kernels import complete
from relive.kernels.sequences import Flags, reset_rows
from relive.rollout.storage import Storage
from relive.schema.assembly import value_of
from relive.schema.autoreset import final_observations, host_flags
from relive.schema.conversion import convert_leaves, path_name
from relive.schema.invariants import require, require_all, require_flags, require_form
from relive.statistics.counting import lock
from relive.statistics.observers import Observers
from relive.storage.codec import Node


class EpisodeFlags:
    """The flags of a rollout's rows, and the environments that reset or start an episode in its first row."""

    def __init__(self, storage: Storage, autoreset: AutoresetMode | None, observers: Observers) -> None:
        self._storage, self._mode, self._observers = storage, autoreset, observers
        self.is_observed = bool(observers.columns)
        self.has_reset_rows = autoreset is AutoresetMode.NEXT_STEP
        """The row after an end only resets: it holds the final observation, and no transition."""
        self.resetting = torch.zeros(storage.num_envs, dtype=torch.bool, device=storage.device)
        """Environments that only reset in the rollout's first row [N]."""
        self.starting = torch.ones_like(self.resetting)
        """Environments that begin an episode with the rollout's first transition [N]."""
        self.finals = FinalObservations(storage)
        self._observed_columns: dict[frozenset[str], tuple[torch.Tensor | None, ...]] = {}
        """The tensors that observers count, by the optional fields that steps do not have."""
        self.begin()

    def begin(self) -> None:
        """Begin a rollout."""
        self.finals.steps = []
        self._coming = self.resetting.clone().unsqueeze(0)
        """Environments that only reset in the coming row [1, N], for observers only."""

    def coming(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Masks [N] of the row after the stored steps: it starts an episode, and it only resets."""
        steps = self._storage.num_stored
        if not steps:
            return self.starting.clone(), self.resetting.clone()
        if not self.has_reset_rows:
            return self.ended(steps - 1), self.resetting.clone()
        resets = self.resets(steps + 1)
        return resets[-2].clone(), resets[-1].clone()

    def begin_next(self, starting: torch.Tensor, resetting: torch.Tensor) -> None:
        """Begin a rollout whose first row starts episodes and resets in these environments [N]."""
        self.starting.copy_(starting)
        self.resetting.copy_(resetting)
        self.begin()

    # Rows

    def flag(self, name: str) -> torch.Tensor:
        """The tensor "terminated" or "truncated" [T + 1, N]."""
        return self._storage.tensors[self._storage.schema.leaf_indices[name][0]]

    def ended(self, rows: int | slice) -> torch.Tensor:
        """Mask of the rows that end an episode by their flags."""
        return self.flag("terminated")[rows] | self.flag("truncated")[rows]

    def resets(self, steps: int) -> torch.Tensor:
        """Mask of the first rows that only reset [steps, N], under NEXT_STEP."""
        return reset_rows(self.resetting, self.ended(slice(0, steps - 1)))

    def starts(self, steps: int) -> torch.Tensor:
        """Mask of the first rows that start an episode [steps, N], as far as they are transitions."""
        before = self.resets(steps)[:-1] if self.has_reset_rows else self.ended(slice(0, steps - 1))
        return torch.cat([self.starting.unsqueeze(0), before])

    def mask(self, steps: int) -> torch.Tensor | None:
        """Mask of the first rows that are transitions [steps, N]; None where all are."""
        return ~self.resets(steps) if self.has_reset_rows and steps else None

    def whole_mask(self, steps: int) -> torch.Tensor:
        """Mask of the first rows that are transitions [steps, N]."""
        mask = self.mask(steps)
        return torch.ones_like(self.flag("terminated")[:steps]) if mask is None else mask

    def transitions(self) -> torch.Tensor | int:
        """The flat rows t·N + n of the stored transitions; a number: all below it."""
        steps = self._storage.num_stored
        mask = self.mask(steps)
        return steps * self._storage.num_envs if mask is None else mask.flatten().nonzero().squeeze(1)

    def for_sequences(self, steps: int) -> Flags:
        """The flags of the first steps, for cutting them into sequences."""
        return Flags(steps, self.flag("terminated"), self.flag("truncated"), self.mask(steps), self.starting)

    # A step

    def finals_of_add(self, row: int, final_obs: Any, terminated: Any, truncated: Any) -> StepFinals | None:
        """The final observations among `final_obs` of all environments; all of its rows are checked."""
        if self.has_reset_rows:
            remedy = "Leave it out: the row after an end holds the final observation."
            raise SchemaError(explain("final_obs", "None under autoreset=NEXT_STEP", type(final_obs).__name__, remedy))
        envs = self._truncated_envs(row, terminated, truncated)
        return self.finals.of_step(row, envs, final_obs)

    def finals_of_step(self, row: int, step: tuple[Any, Any, Any, Any, Mapping[str, Any]]) -> StepFinals | None:
        """The final observations where the autoreset mode leaves them in the result of `env.step`."""
        if self.has_reset_rows:
            return None
        next_obs, _, terminated, truncated, info = step
        envs = self._truncated_envs(row, terminated, truncated)
        if not envs:
            return None
        return self.finals.of_step(row, envs, next_obs, info if self._mode is AutoresetMode.SAME_STEP else None)

    def _truncated_envs(self, row: int, terminated: Any, truncated: Any) -> list[int]:
        """The environments whose episode is truncated, and not terminated, by the step that is being added."""
        storage, flags = self._storage, {"terminated": terminated, "truncated": truncated}
        staged = {name: self.flag(name)[row].view(storage.lead) for name in flags if name in storage.staged}
        ended, cut = host_flags(flags | staged, storage.lead, storage.device)
        return (cut & ~ended).nonzero()[0].tolist()

    def commit(self, row: int, finals: StepFinals | None, measured: Mapping[str, Any]) -> None:
        """Make a written row a stored step; if observers refuse it, nothing has changed."""
        steps = self.finals.steps if finals is None else [*self.finals.steps, finals]

        def change() -> None:
            self.finals.steps = steps
            self._storage.commit(row)

        self.count(row, 1, self._storage.missing, measured, change)

    def count(
        self, row: int, steps: int, missing: frozenset[str], measured: Mapping[str, Any], then: Callable[[], None]
    ) -> None:
        """Let observers count written rows without the fields `missing`, and make the change `then`.

        If this raises before `then`, nothing has changed. Calling `then` twice leads to the same state.
        """
        observers = self._observers
        if steps < 1 or not observers.columns:
            complete(then)
            return
        columns = self._observed_columns.get(missing) or self._observed_columns.setdefault(
            missing, self._select_columns(missing)
        )
        resetting = self._coming if self.has_reset_rows else None
        if observers.native is not None:
            observers.measure(measured)
            if not kernels.exchange():
                columns, resetting = tuple(map(kernels.buffer_of, columns)), kernels.buffer_of(resetting)
            observers.native.count(columns, row, steps, None, resetting, then)
            return
        block = {i: column[row : row + steps] for i, column in enumerate(columns) if column is not None}
        with lock:
            count, coming = observers.plan(block, None if resetting is None else resetting[0], measured)

            def change() -> None:
                count()
                if coming is not None:
                    self._coming = coming.unsqueeze(0)
                then()

            complete(change)

    def _select_columns(self, missing: frozenset[str]) -> tuple[torch.Tensor | None, ...]:
        """The tensors that observers count, or None, of steps without the fields `missing`."""
        leaves = enumerate(zip(self._storage.schema.paths, self._storage.tensors, strict=True))
        columns = self._observers.columns
        return tuple(leaf if i in columns and path[0] not in missing else None for i, (path, leaf) in leaves)

    def take_back(self) -> None:
        """Go on after rows that a collector wrote."""
        if self.has_reset_rows:
            self._coming = self.resets(self._storage.num_stored + 1)[-1:].clone()

    # State

    def state(self) -> State:
        """The masks of the first row, and the resets that observers expect in the coming one."""
        return State({}, {"resetting": self.resetting, "starting": self.starting, "coming": self._coming})

    def load_state(self, saved: SnapshotReader) -> None:
        """Restore a saved state."""
        saved.copy_into({"resetting": self.resetting, "starting": self.starting})
        self.begin()
        self._coming = saved.array("coming", self.resetting.unsqueeze(0)).to(self._storage.device, copy=True)

    def check(self) -> None:
        """Verify every flag, and the resets that observers expect in the coming row."""
        storage, steps = self._storage, self._storage.num_stored
        own = {"resetting": self.resetting, "starting": self.starting}
        for name, flags in own.items():
            require_form(name, flags, (storage.num_envs,), torch.bool, storage.device)
        ends = {name: self.flag(name)[:steps] for name in ("terminated", "truncated")}
        if not storage.has_values:
            return
        for name, flags in {**ends, **own}.items():
            require_flags(name, flags)
        allowed = ~self.resetting | self.has_reset_rows
        require_all(allowed, "resetting", "False unless autoreset=NEXT_STEP", self.resetting)
        if self.is_observed and self.has_reset_rows:
            coming, announced = self._coming, self.resets(steps + 1)[-1:]
            require_all(coming == announced, "coming resets", "the resets that the stored flags announce", coming)


class StepFinals(NamedTuple):
    """The final observations of one step: the K environments that have one, and leaves [K, …]."""

    step: int
    envs: list[int]
    leaves: list[torch.Tensor]


class FinalObservations:
    """The true final observations of truncated steps whose next row does not hold them, in the order of t·N + n."""

    def __init__(self, storage: Storage) -> None:
        self._storage, self._schema = storage, storage.schema
        self._fields = [storage.schema.fields[i] for i in storage.schema.leaf_indices["obs"]]
        self.steps: list[StepFinals] = []

    def of_step(self, step: int, envs: list[int], obs: Any, info: Mapping[str, Any] | None = None) -> StepFinals | None:
        """The rows `envs` of an observation of all environments, or their final observations in `info`; not stored."""
        lead, device = self._storage.lead, self._storage.device
        if info is None:
            leaves = convert_leaves(self._schema, "obs", obs, lead, device, envs if lead else None, prefix="final_")
        else:
            envs, leaves = final_observations(info, envs, self._schema, lead, device)
        if not envs:
            return None
        return StepFinals(step, envs, leaves if lead else [leaf.unsqueeze(0).clone() for leaf in leaves])

    @property
    def places(self) -> list[tuple[int, int]]:
        """(step, environment) of each."""
        return [(finals.step, env) for finals in self.steps for env in finals.envs]

    @property
    def obs(self) -> Any:
        """All of them: a tensor [K, …], or a TensorDict [K] of a nested observation."""
        leaves = [
            torch.cat([
                torch.empty((0, *field.shape), dtype=field.dtype, device=self._storage.device),
                *(finals.leaves[i] for finals in self.steps),
            ])
            for i, field in enumerate(self._fields)
        ]  # fmt: skip
        return value_of(self._schema, "obs", leaves, leaves[0].shape[:1])

    def state(self) -> State:
        """All of them, with their places."""
        leaves = [torch.cat(parts) for parts in zip(*(finals.leaves for finals in self.steps), strict=True)]
        places = torch.tensor(self.places, dtype=torch.int64, device="cpu").view(-1, 2)
        return State({}, {"places": places, **{f"leaf{i}": leaf for i, leaf in enumerate(leaves)}})

    def load_state(self, saved: SnapshotReader) -> None:
        """Restore a saved state; the storage was restored before."""
        self.steps = []
        steps, num_envs = self._storage.num_stored, self._storage.num_envs
        places = saved.shaped("places", (range(steps * num_envs + 1), 2), torch.int64).tolist()
        if not places:
            return
        leaves = [
            saved.shaped(f"leaf{i}", (len(places), *field.shape), field.dtype).to(self._storage.device)
            for i, field in enumerate(self._fields)
        ]
        for i, (step, env) in enumerate(places):
            if not (0 <= step < steps and 0 <= env < num_envs):
                raise Node("state: finals.places", [step, env]).error("a stored step and its environment")
            self.steps.append(StepFinals(step, [env], [leaf[i : i + 1] for leaf in leaves]))

    def check(self) -> None:
        """Verify that each belongs to a truncated step, and that they are in order."""
        storage, leaf_indices = self._storage, self._schema.leaf_indices
        paths = [path_name(self._schema.paths[i]) for i in leaf_indices["obs"]]
        for finals in self.steps:
            for path, field, leaf in zip(paths, self._fields, finals.leaves, strict=True):
                shape = (len(finals.envs), *field.shape)
                require_form(f"final_{path} of step {finals.step}", leaf, shape, field.dtype, storage.device)
        places = self.places
        require(places == sorted(set(places)), "final_obs", "one for each (step, environment), in order", places)
        if not storage.has_values:
            return
        terminated, truncated = (
            storage.tensors[leaf_indices[name][0]][: storage.num_stored] for name in ("terminated", "truncated")
        )
        cut = set(map(tuple, (truncated & ~terminated).nonzero().tolist()))
        wrong = [place for place in places if place not in cut]
        require(not wrong, "final_obs", "(step, environment) of truncated steps", wrong)
