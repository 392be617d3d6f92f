"""The on-policy buffer: a fixed number of steps of every environment, turned into minibatches and thrown away."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from os import PathLike
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict

from recollect import kernels
from recollect.autoreset import observation, parse_autoreset, refuse_reused, settings_of, unpack_step
from recollect.batch import assemble, assembler, check_destination, checked_targets, moved, selected
from recollect.border import as_tensor, conform, dotted, light, overlaps
from recollect.carries import SparseCarries
from recollect.errors import BufferFullError, NotReadyError, SchemaError, explain
from recollect.estimators import gae
from recollect.finals import Finals, Found
from recollect.guard import lock_for
from recollect.invariants.rollout import check_rollout
from recollect.kernels.reader import Following, Reader, T, reader
from recollect.kernels.sequence_index import Flags, find_sequences
from recollect.kernels.sequence_reader import Carried, Layout, SequenceReader, sequence_reader
from recollect.listeners import Listeners
from recollect.memory import Memory
from recollect.norm import RunningNorm
from recollect.randomness import Randomness
from recollect.schema import (
    Carry,
    Declaration,
    Field,
    Path,
    Schema,
    declare,
    declare_real,
    named_leaves,
    positive,
    refuse_reserved,
    refuse_sparse,
    unstacked,
)
from recollect.sequences import Mode, check_layout, cuts_of, moved_sequences
from recollect.stats import EpisodeStats
from recollect.storage import Storage

_FLAG = Field((), torch.bool)
_MADE = ("mask", "index", "is_first", "batch_sizes")
"""What reading adds to a batch."""
_RESERVED = (
    *_MADE,
    "obs",
    "action",
    "reward",
    "terminated",
    "truncated",
    "value",
    "advantage",
    "return",
    "final_obs",
    "step",
    "self",
)

_OPTIONAL = frozenset(("value", "log_prob"))

_NOTHING: Mapping[str, Any] = {}

_Read = Callable[[torch.Tensor, int, int], TensorDict]
"""The batch of the rows index[start:stop]."""


class RolloutBuffer:
    """`num_steps` steps of `num_envs` environments, stored once as `[num_steps + 1, num_envs, …]`.

    Everything at index t belongs to the action taken at t. `num_envs=None` is one environment without an environment
    axis. `extra` declares further fields (action masks, privileged observations, …); a `log_prob` declared there
    replaces the default, which has the reward's shape. `stats` is told of every transition, with metrics and reasons
    from the fields of these names, or from the info that `add_step` gets. `norm` names fields (or paths to
    leaves) whose stored values each norm takes in: those of transitions, not of rows that only reset.

    >>> rollout = RolloutBuffer(num_steps=2, num_envs=None, obs=3, action=())
    >>> for step in range(2):
    ...     rollout.add([step, 0, 0], 0.5, 1.0, terminated=False, truncated=False, value=0.0)
    >>> rollout.compute_advantage(last_value=0.0, gamma=1.0, lam=1.0)
    >>> rollout["advantage"]
    tensor([2., 1.])

    A critic that sees more than the policy: `obs={"policy": 4, "critic": 9}` keeps both parts, also of final
    observations; `extra={"privileged": 9}` is for what only the stored steps need. `minibatches` reads one part alone
    with `fields=[("obs", "critic"), "return"]`.

    Several agents are an axis (`reward=(A,), value=(A,)`) or a dict of agents; log_prob, advantages and returns are as
    the rewards are, and statistics count the sum of all. `terminated` and `truncated` are the environment's. An agent
    that ends before it has reward 0 and value 0 from then on, in `last_value` and `final_value` too: its last step is
    not bootstrapped and what follows has advantage 0. Keep who is alive in the observation, to make the values so and
    to weigh the loss. Agents that end and start again on their own are environments: num_envs = N · A.

    >>> each = {"fox": (), "hare": ()}
    >>> pair = RolloutBuffer(1, None, obs={"fox": 2, "hare": 3}, action=each, reward=each, value=each)
    >>> obs, reward = {"fox": [0, 0], "hare": [0, 0, 0]}, {"fox": 1.0, "hare": -1.0}
    >>> pair.add(obs, {"fox": 1, "hare": 2}, reward, True, False, value={"fox": 0.5, "hare": 0.5})
    >>> pair.compute_advantage(last_value={"fox": 0.0, "hare": 0.0})
    >>> pair["advantage", "hare"]
    tensor([-1.5000])
    """

    @torch.inference_mode(False)  # the memory is written later, in whatever mode
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
        stats: EpisodeStats | None = None,
        norm: Mapping[str | Path, RunningNorm] | None = None,
        seed: int | None = None,
    ) -> None:
        self.num_steps = num_steps = positive("num_steps", num_steps)
        self.num_envs = num_envs = None if num_envs is None else positive("num_envs", num_envs)
        self.autoreset = parse_autoreset(autoreset)
        schema = _schema(obs, action, reward, value, extra or {})
        self._storage = Storage(schema, num_steps + 1, num_envs, Memory.of(device), _OPTIONAL)
        self.device = self._storage.device
        self._schema = schema
        self._agents = _agents(schema)
        self._carried = [
            path for path, field in zip(schema.paths, schema.fields, strict=True) if isinstance(field, Carry)
        ]
        self._extra_names = schema.names[7:]
        self._random = Randomness(seed)
        self._lock = lock_for(self)
        self._resetting = torch.zeros(num_envs or 1, dtype=torch.bool, device=self.device)
        self._starting = torch.ones_like(self._resetting)
        """Which environments begin an episode with the rollout's first transition [N]."""
        self._generation = 0
        self._finals = Finals(schema, self._storage.lead, self.device)
        next_step = self.autoreset is AutoresetMode.NEXT_STEP
        self._carries = SparseCarries(schema, num_steps, num_envs or 1, self.device, next_step)
        self._listeners = Listeners(stats, norm, schema, self.num_envs, self.device)
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
        next_obs, reward, terminated, truncated, info = parts
        with self._lock:
            row = self._next_row()
            refuse_reused(self._schema, obs, next_obs)
            measured = self._listeners.measured(info, self._storage.lead, self.autoreset)
            finals = None
            if self.autoreset is not AutoresetMode.NEXT_STEP:
                finals = self._finals_of_step(row, parts, self._cut_off(row, terminated, truncated))
            self._write(row, (obs, action, reward, terminated, truncated, value, log_prob), extra)
            self._commit(row, finals, value is not None, measured)

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

    def lend(self) -> TensorDict:
        """All of the memory as a TensorDict `[N, T + 1]`, for a collector that writes steps there itself.

        `take_back` makes what it wrote the stored steps.
        """
        with self._lock:
            refuse_sparse(self._schema, "a rollout that is lent")
            return self._env_major(self.num_steps, dict(zip(self._schema.paths, self._storage.columns, strict=True)))

    def take_back(self, num_steps: int | None = None) -> None:
        """Make the first `num_steps` rows of the memory (all by default), written through `lend()`, the stored steps.

        Every field counts as given, and the row after them holds the last observation and value. What was attached is
        forgotten; statistics are told of the steps that were not stored before.
        """
        count = self.num_steps if num_steps is None else num_steps
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or not 0 <= count <= self.num_steps:
            remedy = "Say how many rows were written."
            raise SchemaError(explain("take_back", f"0 to {self.num_steps} steps", repr(count), remedy))
        count = int(count)
        with self._lock:
            refuse_sparse(self._schema, "a rollout that is lent")
            self._storage.follow()
            self._last = None  # the collector may have written a newer one
            for row in range(self._num_stored, count if self._listeners.columns else 0):
                self._tell(row, _NOTHING)
            self._empty()
            self._num_stored = self._valued = count
            if self.autoreset is AutoresetMode.NEXT_STEP:
                self._coming = light(self._resets(count + 1)[-1:])
            value, obs = (
                [
                    self._storage.columns[i][count]
                    .reshape((*self._storage.lead, *self._schema.fields[i].shape))
                    .clone()
                    for i in self._schema.columns[name]
                ]
                for name in ("value", "obs")
            )
            self._last = value, obs

    def clear(self, *, restarted: bool = False) -> None:
        """Forget the stored steps and what was attached; the environments' pending resets are remembered.

        Statistics are of the environments, not of what is stored: episodes that are running go on in the next rollout.
        `restarted=True` says that `env.reset()` was called on all of them since, so that no reset row is coming and the
        running episodes will not be finished.
        """
        with self._lock:
            if restarted:
                self._resetting.zero_()
                self._starting.fill_(True)
                self._listeners.restarted()
            elif self._num_stored:
                # One row further than what is stored: whether the coming one starts an episode, and whether it resets.
                self._starting.copy_(self._starts(self._num_stored + 1)[-1])
                if self.autoreset is AutoresetMode.NEXT_STEP:
                    self._resetting.copy_(self._resets(self._num_stored + 1)[-1])
            self._empty()

    def save(self, path: str | PathLike[str], *, keep: int = 2) -> int:
        """Write a checkpoint below the folder `path`, whole or not at all, and return its number.

        The newest `keep` checkpoints stay. What is saved is everything: rows, what is attached or staged, final
        observations, hidden states, pending resets, statistics, norms and the generator. `recollect.load(path)` goes on
        from it exactly.
        """
        from recollect.checkpoint import save  # noqa: PLC0415 (checkpoints know every buffer)

        return save(self, path, keep=keep)

    def _empty(self) -> None:
        self._generation += 1
        self._num_stored = 0
        self._valued = 0
        self._staged: set[str] = set()
        self._finals.clear()
        self._carries.begin(self._resetting)
        self._attached: dict[Path, torch.Tensor] = {}
        self._last: tuple[list[torch.Tensor], list[torch.Tensor] | None] | None = None
        """The last value and observation that the row after the stored ones holds."""
        self._coming = light(self._resetting.clone().unsqueeze(0))
        """Which environments only reset in the coming row [1, N], for those who are told of it."""

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

    def _commit(self, row: int, finals: Found | None, valued: bool, measured: Mapping[str, Any] = _NOTHING) -> None:
        """Make the written row part of the rollout; until here nothing has changed for anybody."""
        if self._listeners.columns:
            self._tell(row, measured)
        if finals is not None:
            self._finals.keep(finals)
        self._valued += valued or "value" in self._staged
        if self._staged or self._attached:
            self._staged.clear()
            self._attached.clear()
        self._last = None
        if self._carries.columns:
            self._carries.keep(row, self._storage.columns, self._ended(row))
        self._num_stored = row + 1

    def _tell(self, row: int, measured: Mapping[str, Any]) -> None:
        block = {i: self._storage.array(i, row) for i in self._listeners.columns}
        mask = ~self._coming if self.autoreset is AutoresetMode.NEXT_STEP else None
        try:
            self._listeners.tell(block, mask, measured)
        except BaseException:
            if self._last is not None and not self._staged:
                self._write_last()
            raise
        if mask is not None:
            self._coming = self._listeners.ended(block) & mask

    # Ends and resets

    def _column(self, name: str) -> torch.Tensor:
        return self._storage.columns[self._schema.columns[name][0]]

    def _resets(self, steps: int) -> torch.Tensor:
        """Which of the first rows only reset [steps, N]: those after an end, which end nothing themselves."""
        ended = self._ended(slice(0, steps - 1))
        after = torch.cat([self._resetting.unsqueeze(0), ended])
        if self.device.type == "cpu" and not (after[:-1] & ended).any():
            return after
        # A reset row that carries a flag of its own: of several ends in a row every other one is a reset.
        place = torch.arange(steps, device=self.device).unsqueeze(1)
        return after & ((place - torch.where(after, -1, place).cummax(0).values) % 2 == 1)

    def _starts(self, steps: int) -> torch.Tensor:
        """Which of the first rows start an episode [steps, N], as far as they are transitions."""
        if self.autoreset is AutoresetMode.NEXT_STEP:
            before = self._resets(steps)[:-1]
        else:
            before = self._ended(slice(0, steps - 1))
        return torch.cat([self._starting.unsqueeze(0), before])

    def _ended(self, rows: int | slice) -> torch.Tensor:
        return self._column("terminated")[rows] | self._column("truncated")[rows]

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
        `final_obs`. `bootstrap_truncated=False` counts truncated steps as ends instead. With a dict of agents all of
        them are dicts, and every agent's advantages are estimated from its own rewards and values.
        """
        with self._lock:
            steps = self._whole("compute_advantage")
            self._require_values(steps)
            lead = self._storage.lead
            last = [value.clone() for value in self._values("last_value", last_value, lead)]
            obs = None
            if last_obs is not None:
                leaves = observation(self._schema, last_obs, lead, self.device, prefix="last_")
                obs = [leaf.clone() for leaf in leaves]
            ends, truncated = self._column("terminated")[:steps], self._column("truncated")[:steps]
            places, finals = self._final_values(final_value, bootstrap_truncated, ends, truncated)
            flags = (ends if bootstrap_truncated else ends | truncated, truncated)
            mask = self._mask()
            targets: dict[Path, torch.Tensor] = {}
            for i, (agent, reward, value) in enumerate(self._agents):
                values = self._storage.columns[value][:steps]
                next_values = torch.cat([values[1:], last[i].view(1, *values.shape[1:])])
                if places is not None:
                    next_values[places] = finals[i]
                rewards = self._storage.columns[reward][:steps]
                advantage, return_ = gae(rewards, values, next_values, *flags, gamma=gamma, lam=lam, mask=mask)
                targets |= {("advantage", *agent): advantage, ("return", *agent): return_}
            self._last = last, obs
            self._write_last()
            self._attach_columns(targets)

    def _require_values(self, steps: int) -> None:
        if self._valued < steps:
            remedy = "Pass value= to every add."
            raise NotReadyError(explain("compute_advantage", f"a value at {steps} steps", self._valued, remedy))
        if not self._agents:
            reward, value = (self._schema.trees[name] for name in ("reward", "value"))
            remedy = "Pass value= to the buffer in the form of reward=."
            raise SchemaError(explain("value", f"one for each reward ({reward})", value, remedy))

    def _write_last(self) -> None:
        assert self._last is not None
        (last, obs), row = self._last, self._num_stored
        self._storage.zero(row)
        self._storage.write(row, tuple(last), self._schema.columns["value"])
        if obs is not None:
            self._storage.write(row, tuple(obs), self._schema.columns["obs"])

    def _values(self, where: str, given: Any, lead: tuple[int, ...], unit: str = "environments") -> list[torch.Tensor]:
        """The leaves of values that no stored step has, checked as those of the steps are."""
        schema = self._schema
        return [
            conform(dotted((where, *schema.paths[i][1:])), schema.fields[i], leaf, lead, self.device, unit=unit)
            for i, leaf in zip(schema.columns["value"], schema.flatten("value", given, where), strict=True)
        ]

    def _final_values(
        self, final_value: Any, bootstrap: bool, ends: torch.Tensor, truncated: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...] | None, list[torch.Tensor]]:
        """Where the next value is not the next row's, (steps, envs) or None, and the leaves of what it is."""
        known = self._finals.places
        if not bootstrap:
            if final_value is not None:
                remedy = "Leave one of them out."
                raise SchemaError(explain("final_value", "none with bootstrap_truncated=False", "values", remedy))
            return None, []
        if self.autoreset is not AutoresetMode.NEXT_STEP:
            self._require_finals(truncated & ~ends, known)
        if final_value is None and known:
            remedy = "Pass final_value=critic(rollout.final_obs), or bootstrap_truncated=False to count them as ends."
            where = f"final_value of {len(known)} truncated steps"
            raise NotReadyError(explain(where, "their values", "none", remedy))
        if final_value is None:
            return None, []
        values = self._values("final_value", final_value, (len(known),), "truncated steps")
        places = torch.tensor(known, dtype=torch.int64, device=self.device).view(-1, 2).unbind(1)
        return places, values

    @staticmethod
    def _require_finals(cut: torch.Tensor, known: list[tuple[int, int]]) -> None:
        if int(cut.sum()) <= len(known):
            return
        step, env = next((t, n) for t, n in cut.nonzero().tolist() if (t, n) not in set(known))
        remedy = "Pass final_obs= to add, use add_step, or pass bootstrap_truncated=False to count it as an end."
        where = f"final_obs of step {step}, environment {env}"
        raise NotReadyError(explain(where, "the state a truncated step led to", "none", remedy))

    def attach(self, named: Mapping[str, Any] | None = None, /, **fields: Any) -> None:
        """Let further tensors `[T, N, …]`, or dicts of them, join every batch until `clear()`; they are copied."""
        with self._lock:
            steps = self._stored("attach")
            columns: dict[Path, torch.Tensor] = {}
            lead, taken = (steps, *self._storage.lead), {*self._schema.columns, *_MADE}
            for name, tree in [*({} if named is None else named).items(), *fields.items()]:
                if not isinstance(name, str) or name in taken:
                    raise SchemaError(explain(str(name), "a name of its own", "a taken one", "Attach it as another."))
                taken.add(name)
                for path, value in named_leaves(name, tree):
                    tensor = as_tensor(dotted(path), value, self.device)
                    whole = Field(tuple(tensor.shape[len(lead) :]), tensor.dtype)
                    tensor = conform(dotted(path), whole, tensor.to(self.device), lead, self.device)
                    columns[path] = tensor if self._storage.lead else tensor.unsqueeze(1)
            self._attach_columns(columns)

    def _attach_columns(self, columns: Mapping[Path, torch.Tensor]) -> None:
        names = {path[0] for path in columns}
        self._attached = {path: column for path, column in self._attached.items() if path[0] not in names}
        for path, tensor in columns.items():
            rest = tensor.new_zeros((self.num_steps + 1 - self._num_stored, *tensor.shape[1:]))
            self._attached[path] = torch.cat([tensor, rest])

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
        target = check_destination(device, out)
        with self._lock:
            self._stored("minibatches")
            generation, rows = self._generation, self._valid_rows()
            chosen = self._select(fields)
            paths, columns = list(chosen), list(chosen.values())
            total = rows if isinstance(rows, int) else len(rows)
            if total == 0 or (drop_last and total < batch_size):
                remedy = "Add steps, or take smaller batches."
                raise NotReadyError(explain("minibatches", f"{batch_size} transitions", total, remedy))
            items = self._num_rows()
            source = self._following(columns, lambda: reader(columns, 2, items))
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
        read = self._read_into(source, targets, out) if targets is not None else self._read_fresh(source, paths, True)
        batches = self._batches(read, self._order(rows, shuffle), batch_size, stop, epochs, generation)
        return batches if target is None else (moved(batch, target) for batch in batches)

    def _batches(
        self, read: _Read, order: Callable[[], torch.Tensor], size: int, per_epoch: int, epochs: int, generation: int
    ) -> Iterator[TensorDict]:
        index = None
        for start in itertools.chain.from_iterable(itertools.repeat(range(0, per_epoch, size), epochs)):
            with self._lock:
                if self._generation != generation:
                    remedy = "Finish the epochs before clear()."
                    raise NotReadyError(explain("batch", "the same rollout", "a cleared one", remedy))
                if index is None or start == 0:
                    index = order()
                batch = read(index, start, min(start + size, per_epoch))
            yield batch

    def _order(self, rows: torch.Tensor | int, shuffle: bool) -> Callable[[], torch.Tensor]:
        """Gives these rows, or all below a number, in the order of an epoch."""
        if isinstance(rows, int):
            return partial(self._random.permutation if shuffle else torch.arange, rows, device=self.device)
        return partial(self._random.shuffled, rows) if shuffle else lambda: rows

    @staticmethod
    def _read_fresh(source: Following[Reader] | Following[SequenceReader], paths: list[Path], batched: bool) -> _Read:
        build, sizes = assembler(paths), {}

        def read(index: torch.Tensor, start: int, stop: int) -> TensorDict:
            size = sizes.get(stop - start)
            if size is None:
                size = sizes[stop - start] = torch.Size((stop - start,) if batched else ())
            return build(source.found().take(index, start, stop), size)

        return read

    @staticmethod
    def _read_into(source: Following[Reader], targets: list[torch.Tensor], out: TensorDict) -> _Read:
        def read(index: torch.Tensor, start: int, stop: int) -> TensorDict:
            source.found().take_into(index, start, stop, targets)
            return out

        return read

    def _valid_rows(self) -> torch.Tensor | int:
        """The flat rows t·N + n that are transitions; a number: all below it."""
        mask = self._mask()
        return self._num_rows() if mask is None else mask.flatten().nonzero().squeeze(1)

    def _num_rows(self) -> int:
        return self._num_stored * (self.num_envs or 1)

    def _select(self, fields: Iterable[str | Path] | None) -> dict[Path, torch.Tensor]:
        rows = (self.num_steps + 1) * (self.num_envs or 1)
        index = torch.arange(rows, device=self.device).view(self.num_steps + 1, -1)
        return selected({**self._leaves(), ("index",): index}, fields)

    def _leaves(self, *, sparse: bool = False) -> dict[Path, torch.Tensor]:
        """What every step has [T + 1, N, …]: its fields, and what is attached; `sparse`: and what some steps have."""
        leaves = dict(zip(self._schema.paths, self._storage.columns, strict=True))
        for column in () if sparse else self._carries.columns:
            del leaves[self._schema.paths[column]]
        return {**leaves, **self._attached}

    def sequences(
        self,
        length: int | None = None,
        *,
        batch_size: int | None = None,
        mode: Mode = "chunked",
        split_episodes: bool = True,
        keep_tail: bool = True,
        epochs: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        layout: Layout = "batch_first",
        fields: Iterable[str | Path] | None = None,
        device: torch.device | str | None = None,
    ) -> Iterator[TensorDict]:
        """Runs of `length` steps of one environment, for truncated back-propagation through time.

        `length=None` takes whole episodes. `mode` says where sequences start: "chunked" one behind the other, "overlap"
        half a length apart, "every" at all steps. Ends of episodes cut them, unless `split_episodes=False`. What full
        sequences leave over becomes one shorter sequence, unless `keep_tail=False`; an episode shorter than `length`
        is one sequence always.

        A batch has batch size [B]: steps are [B, L, …], zero where "mask" [B, L] is False; "is_first" [B, L] says which
        steps start an episode; `Carry` fields [B, …] are those of each sequence's first step, whose t·N + n is "index"
        [B]. Unshuffled, sequences are in order of environments, then time. `batch_size=None` is one batch of all;
        `drop_last` keeps B constant. `layout="time_first"` gives steps as [L, B, …]; `"packed"` gives them without
        padding, so that `PackedSequence(batch["obs"], batch["batch_sizes"])` is what torch's recurrent networks take.
        """
        check_layout(layout)
        target = check_destination(device)
        cuts = cuts_of(length, mode, split_episodes, keep_tail)
        positive("epochs", epochs)
        with self._lock:
            steps = self._stored("sequences")
            self._carries.require(cuts)
            generation = self._generation
            chosen, carried = self._sequence_leaves(fields)
            columns = [*chosen.values(), *(each.items for each in carried.values())]
            flags = Flags(steps, self._column("terminated"), self._column("truncated"), self._mask(), self._starting)
            index = find_sequences(flags, cuts, natively=kernels.reads_natively(columns))
            size = len(index) if batch_size is None else positive("batch_size", batch_size)
            if not index or (drop_last and len(index) < size):
                remedy = "Add steps, or take smaller batches."
                raise NotReadyError(explain("sequences", f"at least {size or 1}", len(index), remedy))
            read_of = (index, length or index.longest, layout, list(chosen.values()), list(carried.values()))
            source = self._following(columns, lambda: sequence_reader(*read_of))
        paths = [*chosen, ("is_first",), ("batch_sizes" if layout == "packed" else "mask",), ("index",), *carried]
        # What is [L, B] or packed, and what is [B], have no leading axis in common.
        read = self._read_fresh(source, paths, layout == "batch_first")
        stop = len(index) - len(index) % size if drop_last else len(index)
        batches = self._batches(read, self._order(len(index), shuffle), size, stop, epochs, generation)
        return batches if target is None else (moved_sequences(batch, target) for batch in batches)

    def _sequence_leaves(
        self, fields: Iterable[str | Path] | None
    ) -> tuple[dict[Path, torch.Tensor], dict[Path, Carried]]:
        """What is read at every step of a sequence, and at its first one."""
        chosen = selected(self._leaves(sparse=True), fields)
        carried = {path: Carried(chosen.pop(path), 2, None) for path in self._carried if path in chosen}
        for column in self._carries.columns:
            if self._schema.paths[column] in carried:
                carried[self._schema.paths[column]] = self._carries.kept(column)
        return chosen, carried

    def _following(self, columns: list[torch.Tensor], make: Callable[[], T]) -> Following[T]:
        return Following(make, columns, lambda: self._storage.is_exposed)

    @property
    def data(self) -> TensorDict:
        """The stored steps as a TensorDict `[T, N]` sharing the buffer's memory, with "mask" and what is attached."""
        with self._lock:
            steps = self._stored("data")
            mask = self._mask()
            if mask is None:
                mask = torch.ones((steps, self.num_envs or 1), dtype=torch.bool, device=self.device)
            return self._shared(steps, {("mask",): mask})

    @property
    def columns(self) -> TensorDict:
        """The whole memory as a TensorDict `[num_steps, N]`, with what is attached.

        Beyond the `num_stored` first rows there are zeros, or an older rollout. For learning there is `data`.
        """
        with self._lock:
            return self._shared(self.num_steps, {})

    def _shared(self, steps: int, more: Mapping[Path, torch.Tensor]) -> TensorDict:
        self._storage.is_exposed = True
        columns = {**self._leaves(), **more}
        leaves = [column[:steps] for column in columns.values()]
        if self.num_envs is None:
            leaves = [leaf.squeeze(1) for leaf in leaves]
        return assemble(list(columns), leaves, torch.Size((steps, *self._storage.lead)))

    def env_major(self) -> TensorDict:
        """The rollout as a TensorDict `[N, T + 1]` that shares the buffer's memory.

        The last slot holds `last_obs` and `last_value` of `compute_advantage`; its other fields are zero, and so are
        these before it.
        """
        with self._lock:
            steps = self._whole("env_major")
            if self._last is None:
                self._storage.zero(steps)
            return self._env_major(steps, self._leaves())

    def _env_major(self, steps: int, columns: Mapping[Path, torch.Tensor]) -> TensorDict:
        self._storage.is_exposed = True
        leaves = [column[: steps + 1].transpose(0, 1) for column in columns.values()]
        return assemble(list(columns), leaves, torch.Size((self.num_envs or 1, steps + 1)))

    def __getitem__(self, name: str | Path) -> Any:
        """One field of the stored steps `[T, N, …]`, sharing the buffer's memory."""
        data = self.data
        try:
            return data[name]
        except KeyError:
            known = ", ".join(map(str, data.keys()))
            raise KeyError(explain(str(name), f"one of {known}", "another", "See rollout.data.")) from None

    def check(self) -> None:
        """Verify every invariant; raises an InvariantError for the first thing that is wrong, and changes nothing."""
        with self._lock:
            check_rollout(self)
            self._listeners.check()
            self._random.check()

    def __len__(self) -> int:
        """The number of stored transitions; rows that only reset do not count."""
        with self._lock:
            mask = self._mask() if self._num_stored else None
            return self._num_rows() if mask is None else int(mask.sum())

    def __repr__(self) -> str:
        return (
            f"RolloutBuffer({self.num_stored} of {self.num_steps} steps, num_envs={self.num_envs}, "
            f"fields=({', '.join(self._schema.names)}), device={str(self.device)!r})"
        )

    @property
    def stats(self) -> EpisodeStats | None:
        """The statistics that every transition is counted in."""
        return self._listeners.stats

    @property
    def norm(self) -> dict[str | Path, RunningNorm]:
        """The norms that take in every transition, by field or path."""
        return self._listeners.norm

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
    rewards, values = declare_real("reward", reward), declare_real("value", value)
    extra_trees = {name: unstacked(declare(f"extra.{name}", tree)) for name, tree in extra.items()}
    log_prob = extra_trees.pop("log_prob", rewards)
    schema = Schema(
        {
            "obs": unstacked(declare("obs", obs)),
            "action": unstacked(declare("action", action)),
            "reward": rewards,
            "terminated": _FLAG,
            "truncated": _FLAG,
            "value": values,
            "log_prob": log_prob,
            **extra_trees,
        }
    )
    refuse_sparse(schema, "what is not extra", schema.names[:7])
    return schema


def _agents(schema: Schema) -> list[tuple[Path, int, int]]:
    """Each agent's path, and its columns of reward and value; none where rewards and values do not correspond."""
    reward, value = ({schema.paths[i][1:]: i for i in schema.columns[name]} for name in ("reward", "value"))
    shapes = [{path: schema.fields[i].shape for path, i in columns.items()} for columns in (reward, value)]
    return [(path, reward[path], value[path]) for path in value] if shapes[0] == shapes[1] else []
