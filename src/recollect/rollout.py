"""The on-policy buffer: a fixed number of steps of every environment, turned into minibatches and thrown away."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict

from recollect.autoreset import observation, parse_autoreset, refuse_reused, settings_of, unpack_step
from recollect.batch import assemble, assembler, check_destination, checked_targets, moved, selected
from recollect.border import as_tensor, conform, overlaps
from recollect.errors import BufferFullError, NotReadyError, SchemaError, explain
from recollect.estimators import gae
from recollect.finals import Finals, Found
from recollect.guard import lock_for
from recollect.kernels.reader import FollowingReader, Reader
from recollect.memory import Memory
from recollect.randomness import Randomness
from recollect.schema import (
    Declaration,
    Field,
    Path,
    Schema,
    declare,
    declare_real,
    positive,
    refuse_reserved,
    unstacked,
)
from recollect.storage import Storage

_FLAG = Field((), torch.bool)
_RESERVED = (
    "obs",
    "action",
    "reward",
    "terminated",
    "truncated",
    "value",
    "advantage",
    "return",
    "mask",
    "index",
    "final_obs",
    "step",
    "self",
)


_Read = Callable[[torch.Tensor, int, int], TensorDict]
"""The batch of the rows index[start:stop]."""


class RolloutBuffer:
    """`num_steps` steps of `num_envs` environments, stored once as `[num_steps + 1, num_envs, …]`.

    Everything at index t belongs to the action taken at t. `num_envs=None` is one environment without an environment
    axis. `extra` declares further fields (action masks, privileged observations, …); a `log_prob` declared there
    replaces the default, which has the reward's shape.

    >>> rollout = RolloutBuffer(num_steps=2, num_envs=None, obs=3, action=())
    >>> for step in range(2):
    ...     rollout.add([step, 0, 0], 0.5, 1.0, terminated=False, truncated=False, value=0.0)
    >>> rollout.compute_advantage(last_value=0.0, gamma=1.0, lam=1.0)
    >>> rollout["advantage"]
    tensor([2., 1.])
    """

    def __init__(
        self,
        num_steps: int,
        num_envs: int | None,
        obs: Declaration,
        action: Declaration,
        *,
        reward: Declaration = (),
        value: Declaration = (),
        extra: Mapping[str, Declaration] | None = None,
        autoreset: AutoresetMode | str | None = None,
        device: torch.device | str | Memory = "cpu",
        stats: Any = None,
        seed: int | None = None,
    ) -> None:
        self.num_steps = positive("num_steps", num_steps)
        self.num_envs = None if num_envs is None else positive("num_envs", num_envs)
        self.autoreset = parse_autoreset(autoreset)
        self.stats: Any = stats
        schema = _schema(obs, action, reward, value, extra or {})
        optional = frozenset(("value", "log_prob"))
        self._storage = Storage(schema, num_steps + 1, num_envs, Memory.of(device), optional)
        self.device = self._storage.device
        self._schema = schema
        self._extra_names = schema.names[7:]
        self._random = Randomness(seed)
        self._lock = lock_for(self)
        self._resetting = torch.zeros(num_envs or 1, dtype=torch.bool, device=self.device)
        self._generation = 0
        self._finals = Finals(schema, self._storage.lead, self.device)
        self._empty()

    @classmethod
    def for_env(cls, env: Any, num_steps: int, **options: Any) -> RolloutBuffer:
        """A buffer for a Gymnasium environment: its spaces, its number of environments and how it resets."""
        return cls(num_steps, **settings_of(env, options))

    # Writing

    def add(
        self,
        obs: Any = None,
        action: Any = None,
        reward: Any = None,
        terminated: Any = None,
        truncated: Any = None,
        *,
        value: Any = None,
        log_prob: Any = None,
        final_obs: Any = None,
        **extra: Any,
    ) -> None:
        """Store one step of every environment.

        `final_obs` [N, …] is the state that truncated steps led to; only the rows of truncated steps are read.
        """
        with self._lock:
            row = self._next_row()
            if final_obs is not None and self.autoreset is AutoresetMode.NEXT_STEP:
                remedy = "Leave it out: the row after an end holds it."
                raise SchemaError(explain("final_obs", "none under autoreset=NEXT_STEP", "an observation", remedy))
            finals = None
            if final_obs is not None:
                finals = self._finals.among(row, final_obs, self._cut_off(row, terminated, truncated))
            self._write(row, (obs, action, reward, terminated, truncated, value, log_prob), extra)
            self._commit(row, finals, value is not None)

    def add_step(
        self,
        obs: Any = None,
        action: Any = None,
        step: tuple[Any, Any, Any, Any, Mapping[str, Any]] | None = None,
        *,
        value: Any = None,
        log_prob: Any = None,
        **extra: Any,
    ) -> None:
        """Store one step as Gymnasium gave it: `step = env.step(action)`, taken in the state `obs`.

        The true final observation of a truncated episode is found where the environment's autoreset mode leaves it.
        """
        parts = unpack_step(step, self.autoreset)
        next_obs, reward, terminated, truncated, _ = parts
        with self._lock:
            row = self._next_row()
            refuse_reused(self._schema, obs, next_obs)
            finals = None
            if self.autoreset is not AutoresetMode.NEXT_STEP:
                finals = self._finals_of_step(row, parts, self._cut_off(row, terminated, truncated))
            self._write(row, (obs, action, reward, terminated, truncated, value, log_prob), extra)
            self._commit(row, finals, value is not None)

    def stage(self, **fields: Any) -> None:
        """Copy some fields of the coming step now, before the environment overwrites them; `add` gives the others."""
        with self._lock:
            row = self._next_row()
            leaves: tuple[Any, ...] = ()
            which: tuple[int, ...] = ()
            for name, value in fields.items():
                self._schema.require(name)
                if name in self._staged:
                    raise SchemaError(explain(name, "a field once a step", "it twice", "Stage it once."))
                if value is None:
                    raise SchemaError(explain(name, "a value", "none", "Leave it out of stage."))
                leaves += self._schema.flatten(name, value)
                which += self._schema.columns[name]
            self._storage.write(row, leaves, which)
            self._staged.update(fields)

    def clear(self, *, restarted: bool = False) -> None:
        """Forget the stored steps and what was attached; the environments' pending resets are remembered.

        `restarted=True` says that `env.reset()` was called on all of them since, so that no reset row is coming.
        """
        with self._lock:
            if restarted:
                self._resetting.zero_()
            elif self._num_stored and self.autoreset is AutoresetMode.NEXT_STEP:
                # One row further than what is stored: whether the coming one resets.
                self._resetting.copy_(self._resets(self._num_stored + 1)[-1])
            self._empty()

    def _empty(self) -> None:
        self._generation += 1
        self._num_stored = 0
        self._valued = 0
        self._staged: set[str] = set()
        self._finals.clear()
        self._attached: dict[str, torch.Tensor] = {}
        self._last: tuple[torch.Tensor, list[torch.Tensor] | None] | None = None
        """The last value and observation that the row after the stored ones holds."""

    def _next_row(self) -> int:
        if self._num_stored == self.num_steps:
            raise BufferFullError(
                explain("add", f"at most {self.num_steps} steps", "one more", "Learn from the rollout and clear() it.")
            )
        return self._num_stored

    def _write(self, row: int, values: tuple[Any, ...], extra: dict[str, Any]) -> None:
        if extra or self._extra_names:
            for name in extra:
                self._schema.require(name)
            values += tuple(map(extra.get, self._extra_names))
        if not self._schema.is_flat:
            flatten = self._schema.flatten
            values = tuple(
                leaf for name, value in zip(self._schema.names, values, strict=True) for leaf in flatten(name, value)
            )
        if self._staged:
            self._write_unstaged(row, values)
        else:
            self._storage.write(row, values)

    def _write_unstaged(self, row: int, leaves: tuple[Any, ...]) -> None:
        which: list[int] = []
        for name in self._schema.names:
            columns = self._schema.columns[name]
            if name not in self._staged:
                which.extend(columns)
            elif any(leaves[i] is not None for i in columns):
                raise SchemaError(explain(name, "a field once a step", "it twice", "It has been staged: leave it out."))
        self._storage.write(row, tuple(leaves[i] for i in which), tuple(which))

    def _commit(self, row: int, finals: Found | None, valued: bool) -> None:
        """Make the written row part of the rollout; until here nothing has changed for anybody."""
        if self.stats is not None:
            self._tell_stats(row)
        if finals is not None:
            self._finals.keep(finals)
        self._valued += valued or "value" in self._staged
        if self._staged or self._attached:
            self._staged.clear()
            self._attached.clear()
        self._last = None
        self._num_stored = row + 1

    def _tell_stats(self, row: int) -> None:
        reward, terminated, truncated = (self._column(name)[row] for name in ("reward", "terminated", "truncated"))
        resets = torch.zeros_like(self._resetting)
        if self.autoreset is AutoresetMode.NEXT_STEP:
            resets = self._resets(row + 1)[-1]
        try:
            self.stats.update(reward, terminated, truncated, mask=~resets)
        except BaseException:
            if self._last is not None:
                self._write_last()
            raise

    # Ends and resets

    def _column(self, name: str) -> torch.Tensor:
        return self._storage.columns[self._schema.columns[name][0]]

    def _resets(self, steps: int) -> torch.Tensor:
        """Which of the first rows only reset [steps, N]: those after an end, which end nothing themselves."""
        rows = slice(0, steps - 1)
        ended = self._column("terminated")[rows] | self._column("truncated")[rows]
        after = torch.cat([self._resetting.unsqueeze(0), ended])
        if self.device.type == "cpu" and not (after[:-1] & ended).any():
            return after
        # A reset row that carries a flag of its own: of several ends in a row every other one is a reset.
        place = torch.arange(steps, device=self.device).unsqueeze(1)
        return after & ((place - torch.where(after, -1, place).cummax(0).values) % 2 == 1)

    def _mask(self) -> torch.Tensor | None:
        """Which stored rows are transitions [T, N]; None where all are."""
        return ~self._resets(self._num_stored) if self.autoreset is AutoresetMode.NEXT_STEP else None

    def _cut_off(self, row: int, terminated: Any, truncated: Any) -> list[int]:
        """The environments whose episode is truncated, and not terminated, by the step that is being added."""
        if "truncated" not in self._staged and not isinstance(truncated, torch.Tensor) and not np.any(truncated):
            return []
        given = {"terminated": terminated, "truncated": truncated}
        ended, cut = (
            self._column(name)[row]
            if name in self._staged
            else conform(name, _FLAG, flag, self._storage.lead, self.device).view(-1)
            for name, flag in given.items()
        )
        return (cut & ~ended).nonzero().squeeze(1).tolist()

    def _finals_of_step(self, row: int, step: tuple[Any, ...], envs: list[int]) -> Found | None:
        if not envs:
            return None
        if self.autoreset is AutoresetMode.SAME_STEP:
            return self._finals.in_info(row, step[4], envs)
        return self._finals.among(row, step[0], envs)

    @property
    def final_obs(self) -> Any:
        """The true final observations [K, …] of truncated steps whose next value is not in the buffer, by t·N + n.

        What `final_value` of `compute_advantage` is the critic's value of. Under NEXT_STEP there are none: the row
        after an end is the final observation.
        """
        with self._lock:
            return self._finals.obs

    # Targets

    def compute_advantage(
        self,
        last_value: Any,
        *,
        last_obs: Any = None,
        final_value: Any = None,
        gamma: float = 0.99,
        lam: float = 0.95,
        bootstrap_truncated: bool = True,
    ) -> None:
        """Attach "advantage" and "return": generalised advantage estimation over the stored steps (see `gae`).

        `last_value` [N] is the value of the observation after the last step. `final_value` [K] is the value of
        `final_obs`. `bootstrap_truncated=False` counts truncated steps as ends instead.
        """
        with self._lock:
            steps = self._whole("compute_advantage")
            if self._valued < steps:
                remedy = "Pass value= to every add."
                raise NotReadyError(explain("compute_advantage", f"a value at {steps} steps", self._valued, remedy))
            lead = self._storage.lead
            last = conform("last_value", self._value_field, last_value, lead, self.device).clone()
            obs = None
            if last_obs is not None:
                leaves = observation(self._schema, last_obs, lead, self.device, prefix="last_")
                obs = [leaf.clone() for leaf in leaves]
            value, truncated = self._column("value")[:steps], self._column("truncated")[:steps]
            next_value = torch.cat([value[1:], last.view_as(value[:1])])
            finals = self._final_values(final_value, bootstrap_truncated)
            if finals is not None:
                next_value[finals[0], finals[1]] = finals[2]
            ends = self._column("terminated")[:steps]
            advantage, return_ = gae(
                self._column("reward")[:steps],
                value,
                next_value,
                ends if bootstrap_truncated else ends | truncated,
                truncated,
                gamma=gamma,
                lam=lam,
                mask=self._mask(),
            )
            self._last = last, obs
            self._write_last()
            self._attach_columns({"advantage": advantage, "return": return_})

    def _write_last(self) -> None:
        assert self._last is not None
        (last, obs), row = self._last, self._num_stored
        self._storage.zero(row)
        self._storage.write(row, (last,), self._schema.columns["value"])
        if obs is not None:
            self._storage.write(row, tuple(obs), self._schema.columns["obs"])

    @property
    def _value_field(self) -> Field:
        return self._schema.fields[self._schema.columns["value"][0]]

    def _final_values(self, final_value: Any, bootstrap: bool) -> tuple[torch.Tensor, ...] | None:
        """Where the next value is not the next row's: (steps, envs, values), or None."""
        known = self._finals.places
        if not bootstrap:
            if final_value is not None:
                remedy = "Leave one of them out."
                raise SchemaError(explain("final_value", "none with bootstrap_truncated=False", "values", remedy))
            return None
        steps = self._num_stored
        if self.autoreset is not AutoresetMode.NEXT_STEP:
            self._require_finals(self._column("truncated")[:steps] & ~self._column("terminated")[:steps], known)
        if final_value is None and known:
            remedy = "Pass final_value=critic(rollout.final_obs), or bootstrap_truncated=False to count them as ends."
            where = f"final_value of {len(known)} truncated steps"
            raise NotReadyError(explain(where, "their values", "none", remedy))
        if final_value is None:
            return None
        values = conform(
            "final_value", self._value_field, final_value, (len(known),), self.device, unit="truncated steps"
        )
        at, envs = torch.tensor(known, dtype=torch.int64, device=self.device).view(-1, 2).unbind(1)
        return at, envs, values

    @staticmethod
    def _require_finals(cut: torch.Tensor, known: list[tuple[int, int]]) -> None:
        if int(cut.sum()) <= len(known):
            return
        step, env = next((t, n) for t, n in cut.nonzero().tolist() if (t, n) not in set(known))
        remedy = "Pass final_obs= to add, use add_step, or pass bootstrap_truncated=False to count it as an end."
        where = f"final_obs of step {step}, environment {env}"
        raise NotReadyError(explain(where, "the state a truncated step led to", "none", remedy))

    def attach(self, named: Mapping[str, Any] | None = None, /, **fields: Any) -> None:
        """Let further tensors `[T, N, …]` join every batch until `clear()`; they are copied."""
        with self._lock:
            steps = self._stored("attach")
            columns: dict[str, torch.Tensor] = {}
            lead = (steps, *self._storage.lead)
            for name, value in [*(named or {}).items(), *fields.items()]:
                if not isinstance(name, str) or name in columns or name in (*self._schema.columns, "mask", "index"):
                    raise SchemaError(explain(str(name), "a name of its own", "a taken one", "Attach it as another."))
                tensor = as_tensor(name, value, self.device)
                whole = Field(tuple(tensor.shape[len(lead) :]), tensor.dtype)
                tensor = conform(name, whole, tensor.to(self.device), lead, self.device)
                columns[name] = tensor if self._storage.lead else tensor.unsqueeze(1)
            self._attach_columns(columns)

    def _attach_columns(self, columns: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in columns.items():
            column = tensor.new_zeros((self.num_steps + 1, *tensor.shape[1:]))
            column[: self._num_stored] = tensor
            self._attached[name] = column

    # Reading

    def minibatches(
        self,
        batch_size: int,
        *,
        epochs: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        fields: Iterable[str | Path] | None = None,
        device: torch.device | str | None = None,
        out: TensorDict | None = None,
    ) -> Iterator[TensorDict]:
        """Every valid transition once an epoch, in batches `[B]` of the caller's own memory.

        `fields` names what is read (all of it by default); `out` is filled and returned instead of fresh tensors.
        "index" is t·N + n.
        """
        positive("batch_size", batch_size)
        positive("epochs", epochs)
        check_destination(device, out)
        with self._lock:
            self._stored("minibatches")
            generation, rows = self._generation, self._valid_rows()
            paths, columns = self._select(fields)
            total = len(rows)
            if total == 0 or (drop_last and total < batch_size):
                remedy = "Add steps, or take smaller batches."
                raise NotReadyError(explain("minibatches", f"{batch_size} transitions", total, remedy))
            items = self._num_stored * (self.num_envs or 1)
            source = FollowingReader(columns, 2, items, lambda: self._storage.is_exposed)
        like = {
            path: ((batch_size, *column.shape[2:]), column.dtype) for path, column in zip(paths, columns, strict=True)
        }
        targets = None if out is None else checked_targets(out, like, self.device)
        if any(overlaps(target, column) for target in targets or () for column in columns):
            raise SchemaError(explain("out", "memory of the caller's", "the rollout's own", "Take a batch as out=."))
        if out is not None and total % batch_size and not drop_last:
            remedy = "Pass drop_last=True or a batch_size that divides them."
            raise SchemaError(explain("out", f"batches of {batch_size} only", f"{total} transitions", remedy))
        stop = total - total % batch_size if drop_last else total
        sizes = [min(batch_size, stop - start) for start in range(0, stop, batch_size)]
        read = self._read_into(source, targets, out) if targets is not None else self._read_fresh(source, paths)
        batches = self._batches(read, rows, sizes * epochs, stop, shuffle, generation)
        return batches if device is None else (moved(batch, device) for batch in batches)

    def _batches(
        self, read: _Read, rows: torch.Tensor, sizes: list[int], per_epoch: int, shuffle: bool, generation: int
    ) -> Iterator[TensorDict]:
        index, start = rows, 0
        for size in sizes:
            with self._lock:
                if self._generation != generation:
                    remedy = "Finish the epochs before clear()."
                    raise NotReadyError(explain("minibatches", "the same rollout", "a cleared one", remedy))
                if start == 0 and shuffle:
                    index = self._random.shuffled(rows)
                batch = read(index, start, start + size)
                start = (start + size) % per_epoch
            yield batch

    @staticmethod
    def _read_fresh(source: Reader, paths: list[Path]) -> _Read:
        build, sizes = assembler(paths), {}

        def read(index: torch.Tensor, start: int, stop: int) -> TensorDict:
            size = sizes.get(stop - start) or sizes.setdefault(stop - start, torch.Size((stop - start,)))
            return build(source.take(index, start, stop), size)

        return read

    @staticmethod
    def _read_into(source: Reader, targets: list[torch.Tensor], out: TensorDict) -> _Read:
        def read(index: torch.Tensor, start: int, stop: int) -> TensorDict:
            source.take_into(index, start, stop, targets)
            return out

        return read

    def _valid_rows(self) -> torch.Tensor:
        """The flat rows t·N + n that are transitions."""
        mask = self._mask()
        if mask is not None:
            return mask.flatten().nonzero().squeeze(1)
        return torch.arange(self._num_stored * (self.num_envs or 1), device=self.device)

    def _select(self, fields: Iterable[str | Path] | None) -> tuple[list[Path], list[torch.Tensor]]:
        everything = [*zip(self._schema.paths, self._storage.columns, strict=True)]
        everything += [((name,), column) for name, column in self._attached.items()]
        rows = (self.num_steps + 1) * (self.num_envs or 1)
        index = torch.arange(rows, device=self.device).view(self.num_steps + 1, -1)
        everything.append((("index",), index))
        return selected(everything, fields)

    @property
    def data(self) -> TensorDict:
        """The stored steps as a TensorDict `[T, N]` sharing the buffer's memory, with "mask" and what is attached."""
        with self._lock:
            steps = self._stored("data")
            self._storage.is_exposed = True
            mask = self._mask()
            if mask is None:
                mask = torch.ones((steps, self.num_envs or 1), dtype=torch.bool, device=self.device)
            leaves = [*(column[:steps] for column in self._storage.columns), mask]
            leaves += [column[:steps] for column in self._attached.values()]
            paths: list[Path] = [*self._schema.paths, ("mask",), *((name,) for name in self._attached)]
            if self.num_envs is None:
                leaves = [leaf.squeeze(1) for leaf in leaves]
            return assemble(paths, leaves, torch.Size((steps, *self._storage.lead)))

    def env_major(self) -> TensorDict:
        """The rollout as a TensorDict `[N, T + 1]` that shares the buffer's memory.

        The last slot holds `last_obs` and `last_value` of `compute_advantage`; its other fields are zero, and so are
        these before it.
        """
        with self._lock:
            steps = self._whole("env_major")
            if self._last is None:
                self._storage.zero(steps)
            self._storage.is_exposed = True
            columns = [*self._storage.columns, *self._attached.values()]
            paths: list[Path] = [*self._schema.paths, *((name,) for name in self._attached)]
            leaves = [column[: steps + 1].transpose(0, 1) for column in columns]
            return assemble(paths, leaves, torch.Size((self.num_envs or 1, steps + 1)))

    def __getitem__(self, name: str | Path) -> Any:
        """One field of the stored steps `[T, N, …]`, sharing the buffer's memory."""
        data = self.data
        try:
            return data[name]
        except KeyError:
            known = ", ".join(map(str, data.keys()))
            raise KeyError(explain(str(name), f"one of {known}", "another", "See rollout.data.")) from None

    def __len__(self) -> int:
        """The number of stored transitions; rows that only reset do not count."""
        with self._lock:
            mask = self._mask() if self._num_stored else None
            return self._num_stored * (self.num_envs or 1) if mask is None else int(mask.sum())

    def __repr__(self) -> str:
        return (
            f"RolloutBuffer({self.num_stored} of {self.num_steps} steps, num_envs={self.num_envs}, "
            f"fields=({', '.join(self._schema.names)}), device={str(self.device)!r})"
        )

    @property
    def nbytes(self) -> int:
        """What this buffer keeps, in bytes: its columns, and what is attached."""
        with self._lock:
            return sum(t.numel() * t.element_size() for t in (*self._storage.columns, *self._attached.values()))

    @property
    def num_stored(self) -> int:
        """How many steps have been added since the start or the last `clear()`."""
        return self._num_stored

    @property
    def is_full(self) -> bool:
        """Whether the next thing to do is to learn."""
        return self._num_stored == self.num_steps

    def _whole(self, where: str) -> int:
        """How many steps are stored, if none is staged in the slot after them."""
        if self._staged:
            remedy = "Complete the staged step with add first."
            raise NotReadyError(explain(where, "whole steps", "a staged one", remedy))
        return self._stored(where)

    def _stored(self, where: str) -> int:
        if not self._num_stored:
            raise NotReadyError(explain(where, "stored steps", "none", "Add steps first."))
        return self._num_stored


def _schema(obs: Any, action: Any, reward: Any, value: Any, extra: Mapping[str, Any]) -> Schema:
    refuse_reserved(extra, _RESERVED)
    scalar = {"reward": declare_real("reward", reward), "value": declare_real("value", value)}
    extra_trees = {name: unstacked(declare(f"extra.{name}", tree)) for name, tree in extra.items()}
    log_prob = extra_trees.pop("log_prob", scalar["reward"])
    return Schema(
        {
            "obs": unstacked(declare("obs", obs)),
            "action": unstacked(declare("action", action)),
            "reward": scalar["reward"],
            "terminated": _FLAG,
            "truncated": _FLAG,
            "value": scalar["value"],
            "log_prob": log_prob,
            **extra_trees,
        }
    )
