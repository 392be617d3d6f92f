"""Which rows of a rollout end an episode, start one or only reset, and the observations that truncated steps led to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from gymnasium.vector import AutoresetMode

from relive import kernels
from relive.checkpoint.snapshot import SnapshotReader, State
from relive.errors import SchemaError, explain, infinite_rewards
from relive.kernels import complete
from relive.kernels.sequence_index import Flags, reset_rows
from relive.rollout.storage import Storage
from relive.schema.assembly import value_of
from relive.schema.autoreset import final_observations, host_flags, observation_leaves
from relive.schema.conversion import path_name
from relive.schema.fields import Field
from relive.schema.invariants import require, require_all, require_flags, require_form
from relive.statistics.counting import lock
from relive.statistics.observers import Observers
from relive.storage.codec import Node


class EpisodeFlags:
    """What the flags of a rollout's rows mean, together with what its environments did before the first row."""

    def __init__(self, storage: Storage, autoreset: AutoresetMode | None, observers: Observers) -> None:
        self._storage, self._mode, self._observers = storage, autoreset, observers
        self.is_observed = bool(observers.columns)
        self.has_reset_rows = autoreset is AutoresetMode.NEXT_STEP
        """The row after an end only resets: it holds the final observation, and no transition."""
        self.resetting = torch.zeros(storage.num_envs, dtype=torch.bool, device=storage.device)
        """Which environments only reset in the rollout's first row [N]."""
        self.starting = torch.ones_like(self.resetting)
        """Which environments begin an episode with the rollout's first transition [N]."""
        self.final_observations = FinalObservations(storage)
        self._counted_columns: dict[frozenset[str], tuple[torch.Tensor | None, ...]] = {}
        """The tensors that observers count, by the fields that steps do not give."""
        self.begin()

    def begin(self) -> None:
        """A rollout begins."""
        self.final_observations.clear()
        self._coming = self.resetting.clone().unsqueeze(0)
        """Which environments only reset in the coming row [1, N]; kept for observers only."""

    def restarted(self) -> None:
        """All environments were reset: each begins an episode in the first row."""
        self.resetting.zero_()
        self.starting.fill_(True)

    def coming(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Masks [N] of the row after the stored steps: it starts an episode, and it only resets."""
        steps = self._storage.num_stored
        starting = self.starts(steps + 1)[-1].clone()
        return starting, self.resets(steps + 1)[-1].clone() if self.has_reset_rows else None

    def go_on(self, starting: torch.Tensor, resetting: torch.Tensor | None) -> None:
        """The next rollout begins after the stored steps, with a row that is `coming`."""
        self.starting.copy_(starting)
        if resetting is not None:
            self.resetting.copy_(resetting)

    # Rows

    def flag(self, name: str) -> torch.Tensor:
        """The tensor "terminated" or "truncated" [T + 1, N]."""
        return self._storage.tensors[self._storage.schema.leaf_indices[name][0]]

    def ended(self, rows: int | slice) -> torch.Tensor:
        """Where a row ends an episode, by its flags."""
        return self.flag("terminated")[rows] | self.flag("truncated")[rows]

    def resets(self, steps: int) -> torch.Tensor:
        """Which of the first rows only reset [steps, N], under NEXT_STEP."""
        return reset_rows(self.resetting, self.ended(slice(0, steps - 1)))

    def starts(self, steps: int) -> torch.Tensor:
        """Which of the first rows start an episode [steps, N], as far as they are transitions."""
        before = self.resets(steps)[:-1] if self.has_reset_rows else self.ended(slice(0, steps - 1))
        return torch.cat([self.starting.unsqueeze(0), before])

    def mask(self, steps: int) -> torch.Tensor | None:
        """Which of the first rows are transitions [steps, N]; None where all are."""
        return ~self.resets(steps) if self.has_reset_rows and steps else None

    def whole_mask(self, steps: int) -> torch.Tensor:
        """The same, where all rows are transitions too."""
        mask = self.mask(steps)
        shape = (steps, self._storage.num_envs)
        return torch.ones(shape, dtype=torch.bool, device=self._storage.device) if mask is None else mask

    def transitions(self) -> torch.Tensor | int:
        """The flat rows t·N + n of the stored transitions; a number: all below it."""
        steps = self._storage.num_stored
        mask = self.mask(steps)
        return steps * self._storage.num_envs if mask is None else mask.flatten().nonzero().squeeze(1)

    def for_sequences(self, steps: int) -> Flags:
        """What must be known to cut the first steps into sequences."""
        return Flags(steps, self.flag("terminated"), self.flag("truncated"), self.mask(steps), self.starting)

    # A step

    def of_add(self, row: int, final_obs: Any, terminated: Any, truncated: Any) -> Found | None:
        """The final observations among `final_obs` of all environments, before the step is written."""
        if self.has_reset_rows:
            remedy = "Leave it out: the row after an end holds the final observation."
            raise SchemaError(explain("final_obs", "None under autoreset=NEXT_STEP", type(final_obs).__name__, remedy))
        envs = self._cut_off(row, terminated, truncated)
        found = self.final_observations.among(row, final_obs, envs)
        self._storage.require_next(row)
        return found

    def of_step(self, row: int, step: tuple[Any, Any, Any, Any, Mapping[str, Any]]) -> Found | None:
        """The final observations where the mode leaves them in what `env.step` returned, before it is written."""
        found = None
        if not self.has_reset_rows:
            next_obs, _, terminated, truncated, info = step
            envs = self._cut_off(row, terminated, truncated)
            if envs and self._mode is AutoresetMode.SAME_STEP:
                found = self.final_observations.in_info(row, info, envs)
            elif envs:
                found = self.final_observations.among(row, next_obs, envs)
        self._storage.require_next(row)
        return found

    def _cut_off(self, row: int, terminated: Any, truncated: Any) -> list[int]:
        """The environments whose episode is truncated, and not terminated, by the step that is being added."""
        storage, given = self._storage, {"terminated": terminated, "truncated": truncated}
        staged = {name: self.flag(name)[row].view(storage.lead) for name in given if name in storage.staged}
        ended, cut = host_flags(given | staged, storage.lead, storage.device)
        return (cut & ~ended).nonzero()[0].tolist()

    def take_in(self, row: int, found: Found | None, measured: Mapping[str, Any], then: Callable[[], None]) -> None:
        """Take in a row that was written, and make the rest of the change; if this raises before, nothing has changed.

        Calling `then` twice leads to the same.
        """
        finals = self.final_observations.with_others(found)

        def change() -> None:
            self.final_observations.replace(finals)
            then()

        self.count(row, 1, self._storage.missing, measured, change)

    def count(
        self, row: int, steps: int, missing: frozenset[str], measured: Mapping[str, Any], then: Callable[[], None]
    ) -> None:
        """Let observers count written rows, and make the rest of the change; fields in `missing` were not given."""
        observers = self._observers
        if steps < 1 or not observers.columns:
            complete(then)
            return
        columns = self._counted_columns.get(missing) or self._counted_columns.setdefault(
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
        """The tensors that observers count, or None, of steps that do not give the fields `missing`."""
        leaves = enumerate(zip(self._storage.schema.paths, self._storage.tensors, strict=True))
        columns = self._observers.columns
        return tuple(leaf if i in columns and path[0] not in missing else None for i, (path, leaf) in leaves)

    def take_back(self) -> None:
        """Go on after rows that somebody else wrote."""
        if self.has_reset_rows:
            self._coming = self.resets(self._storage.num_stored + 1)[-1:].clone()

    # State

    def state(self) -> State:
        """What the environments did before the first row, and what observers expect of the coming one."""
        return State({}, {"resetting": self.resetting, "starting": self.starting, "coming": self._coming})

    def load_state(self, saved: SnapshotReader) -> None:
        """Become what was saved."""
        saved.copy_into({"resetting": self.resetting, "starting": self.starting})
        self.begin()
        self._coming = saved.array("coming", self.resetting.unsqueeze(0)).to(self._storage.device, copy=True)

    def check(self) -> None:
        """Verify every flag, and what observers expect of the coming row."""
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


class StoredDoubts:
    """What the rewards of rollouts on the host show, each kind once: they are not finite, or another autoreset mode."""

    def __init__(self, storage: Storage, flags: EpisodeFlags) -> None:
        self._storage, self._flags = storage, flags
        self._is_finite, self._may_reset_later = storage.device.type == "cpu", not flags.has_reset_rows
        self._after_ends = self._others = self._other_rewards = 0

    def of(self, steps: int) -> Iterator[str]:
        """Look at the stored steps of a rollout, once for each."""
        rewards = [self._storage.tensors[i][:steps] for i in self._storage.schema.leaf_indices["reward"]]
        if self._storage.device.type != "cpu":
            return
        if self._is_finite and not all(bool(reward.isfinite().all()) for reward in rewards):
            self._is_finite = False
            yield infinite_rewards(int(sum((~reward.isfinite()).sum() for reward in rewards)))
        if self._may_reset_later and steps > 1 and self._look_like_reset_rows(rewards, steps):
            self._may_reset_later = False
            remedy = (
                "If the environment resets in the step after an end, declare autoreset=NEXT_STEP: such a step is none."
            )
            got = f"a reward of 0 after all {self._after_ends} ends, and not elsewhere"
            yield explain("autoreset", "steps after an end that are steps of new episodes", got, remedy)

    def _look_like_reset_rows(self, rewards: list[torch.Tensor], steps: int) -> bool:
        """Count what follows an end; False for good once such a step has a reward or ends an episode."""
        given = torch.stack([(reward != 0).flatten(2).any(2) if reward.ndim > 2 else reward != 0 for reward in rewards])
        rewarded, ended = given.any(0).numpy(), self._flags.ended(slice(0, steps)).numpy()
        after = ended[:-1]
        if (after & (rewarded | ended)[1:]).any():
            self._may_reset_later = False
            return False
        self._after_ends += int(after.sum())
        self._others += int((~after).sum())
        self._other_rewards += int((rewarded[1:] & ~after).sum())
        return self._after_ends >= _FEWEST_ENDS and 2 * self._other_rewards > self._others


_FEWEST_ENDS = 8


class Found(NamedTuple):
    """The final observations of one step: of which environments, and their leaves [K, …]."""

    step: int
    envs: list[int]
    leaves: list[torch.Tensor]


class FinalObservations:
    """The true final observations of truncated steps whose next row is not theirs, in the order of t·N + n."""

    def __init__(self, storage: Storage) -> None:
        self._storage, self._schema, self._device = storage, storage.schema, storage.device
        self._found: list[Found] = []

    def among(self, step: int, obs: Any, envs: list[int]) -> Found | None:
        """The rows `envs` of an observation of all environments; the whole of it is checked, nothing is kept yet."""
        lead = self._storage.lead
        leaves = observation_leaves(self._schema, obs, lead, self._device, rows=envs if lead else None)
        return self._of(step, envs, leaves)

    def in_info(self, step: int, info: Mapping[str, Any], envs: list[int]) -> Found | None:
        """Those of the environments `envs` that the info of a step holds; nothing is kept yet."""
        return self._of(step, *final_observations(info, envs, self._schema, self._storage.lead, self._device))

    def _of(self, step: int, envs: list[int], leaves: list[torch.Tensor]) -> Found | None:
        if not envs:
            return None
        return Found(step, envs, leaves if self._storage.lead else [leaf.unsqueeze(0).clone() for leaf in leaves])

    def with_others(self, found: Found | None) -> list[Found]:
        """All of them, and what was found."""
        return self._found if found is None else [*self._found, found]

    def replace(self, found: list[Found]) -> None:
        """Make these the final observations of the rollout."""
        self._found = found

    def clear(self) -> None:
        """Forget them."""
        self._found = []

    @property
    def places(self) -> list[tuple[int, int]]:
        """(step, environment) of each."""
        return [(found.step, env) for found in self._found for env in found.envs]

    @property
    def obs(self) -> Any:
        """All of them: a tensor [K, …], or a TensorDict [K] of a nested observation."""
        none = (torch.empty((0, *field.shape), dtype=field.dtype, device=self._device) for field in self._fields)
        leaves = [torch.cat([empty, *(found.leaves[i] for found in self._found)]) for i, empty in enumerate(none)]
        return value_of(self._schema, "obs", leaves, leaves[0].shape[:1])

    @property
    def _fields(self) -> list[Field]:
        return [self._schema.fields[i] for i in self._schema.leaf_indices["obs"]]

    def state(self) -> State:
        """All of them, with their places."""
        leaves = [torch.cat(parts) for parts in zip(*(found.leaves for found in self._found), strict=True)]
        places = torch.tensor(self.places, dtype=torch.int64, device="cpu").view(-1, 2)
        return State({}, {"places": places, **{f"leaf{i}": leaf for i, leaf in enumerate(leaves)}})

    def load_state(self, saved: SnapshotReader) -> None:
        """Become what was saved, of the steps of the storage that was loaded before."""
        self.clear()
        steps, num_envs = self._storage.num_stored, self._storage.num_envs
        places = saved.shaped("places", (range(steps * num_envs + 1), 2), torch.int64).tolist()
        if not places:
            return
        leaves = [
            saved.shaped(f"leaf{i}", (len(places), *field.shape), field.dtype).to(self._device)
            for i, field in enumerate(self._fields)
        ]
        for i, (step, env) in enumerate(places):
            if not (0 <= step < steps and 0 <= env < num_envs):
                raise Node("state: finals.places", [step, env]).error("a stored step and its environment")
            self._found.append(Found(step, [env], [leaf[i : i + 1] for leaf in leaves]))

    def check(self) -> None:
        """Verify that each belongs to a truncated step, and that they are in order."""
        paths = [path_name(self._schema.paths[i]) for i in self._schema.leaf_indices["obs"]]
        for found in self._found:
            for path, field, leaf in zip(paths, self._fields, found.leaves, strict=True):
                shape = (len(found.envs), *field.shape)
                require_form(f"final_{path} of step {found.step}", leaf, shape, field.dtype, self._device)
        places = self.places
        require(places == sorted(set(places)), "final_obs", "one for each (step, environment), in order", places)
        if not self._storage.has_values:
            return
        terminated, truncated = (self._schema.leaf_indices[name][0] for name in ("terminated", "truncated"))
        tensors, steps = self._storage.tensors, self._storage.num_stored
        cut = tensors[truncated][:steps] & ~tensors[terminated][:steps]
        wrong = [place for place in places if place not in set(map(tuple, cut.nonzero().tolist()))]
        require(not wrong, "final_obs", "(step, environment) of truncated steps", wrong)
