"""The on-policy buffer: a fixed number of steps of every environment, turned into minibatches and thrown away."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from os import PathLike
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict

from relive import kernels
from relive.errors import BufferFullError, NotReadyError, SchemaError, explain, uniterable
from relive.fields.autoreset import observation, parse_autoreset, refuse_reused, settings_of, unpack_step
from relive.fields.batch import check_destination, moved
from relive.fields.buffer_schemas import OPTIONAL, rollout_schema
from relive.fields.conversion import light
from relive.fields.display import buffer_card, size_told
from relive.fields.schema import Declaration, Path, positive, refuse_sparse
from relive.fields.vocabulary import answers, understands
from relive.kernels.reader import reader
from relive.kernels.sequence_index import Flags, find_sequences
from relive.kernels.sequence_reader import Layout, sequence_reader
from relive.locking import lock_for
from relive.memory import Memory
from relive.randomness import Randomness
from relive.rollout.advantages import Advantages, attachable
from relive.rollout.batching import Read, order_of, read_fresh, read_in_batches, read_into
from relive.rollout.columns import Columns, absence_of
from relive.rollout.finals import Finals, Found
from relive.rollout.hidden_states import SparseCarries
from relive.rollout.invariants import check_rollout
from relive.rollout.resets import Resets
from relive.rollout.sequences import Mode, check_layout, cuts_of, moved_sequences
from relive.rollout.step_writer import StepWriter
from relive.rollout.storage import Storage
from relive.statistics.episodes import EpisodeStats
from relive.statistics.norm import Norms, RunningNorm
from relive.statistics.observers import Observers

_NOTHING: Mapping[str, Any] = {}


@understands
class RolloutBuffer:
    """`num_steps` steps of `num_envs` environments, stored once as `[num_steps + 1, num_envs, …]`.

    Everything at index t belongs to the action taken at t.

    Args:
        num_steps: steps of every environment in one rollout.
        num_envs: environments that are stepped together. None is one environment without an environment axis.
        obs: one environment's observation: a shape, a `Field`, or a dict or tuple of them.
        action: one environment's action, declared likewise.
        reward: one environment's reward, declared likewise; one number by default.
        value: what the critic says of one observation, declared likewise; one number by default.
        extra: further fields by name (action masks, privileged observations, …). A `log_prob` declared here replaces
            the default, which has the reward's shape.
        autoreset: how the vector environment resets: "NEXT_STEP", "SAME_STEP" or "DISABLED". `add_step` needs it.
        device: where the rollout is stored: a torch device, or a `Memory`.
        stats: counts every transition; its metrics and reasons are the fields of these names, or come from the info
            that `add_step` gets.
        norm: running norms by field (or path to a leaf). Each takes in the stored values of its field: those of
            transitions, not of rows that only reset.
        seed: seed of the shuffling; None takes one from the system.

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

    @answers
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
        norm: Norms | None = None,
        seed: int | None = None,
    ) -> None:
        self.num_steps = num_steps = positive("num_steps", num_steps)
        self.num_envs = num_envs = None if num_envs is None else positive("num_envs", num_envs)
        self.autoreset = parse_autoreset(autoreset)
        schema = rollout_schema(obs, action, reward, value, extra or {})
        self._storage = Storage(schema, num_steps + 1, num_envs, Memory.of(device), frozenset(OPTIONAL))
        self.device = self._storage.device
        self._schema = schema
        self._writer = StepWriter(self._storage, schema.names[7:])
        self._is_plain, self._staged = self._writer.is_plain, self._writer.staged
        self._random = Randomness(seed)
        self._lock = lock_for(self)
        self._resets = Resets(self._storage, num_envs or 1, self.autoreset)
        self._generation = 0
        self._finals = Finals(schema, self._storage.lead, self.device)
        self._advantages = Advantages(self._storage, self._resets, self._finals)
        self._carries = SparseCarries(schema, num_steps, num_envs or 1, self.device, self._resets.next_step)
        self._columns = Columns(self._storage, self._carries, num_steps + 1)
        self._attached = self._columns.attached
        self._listeners = Observers(stats, norm, schema, self.num_envs, self.device)
        self._expect(value=True, log_prob=True)
        self._empty()

    @classmethod
    @answers
    def for_env(
        cls,
        env: Any,
        num_steps: int,
        *,
        obs: Declaration | None = None,
        action: Declaration | None = None,
        reward: Declaration = (),
        value: Declaration = (),
        extra: Mapping[str, Declaration] | None = None,
        autoreset: AutoresetMode | str | None = None,
        device: torch.device | str | Memory = "cpu",
        stats: EpisodeStats | None = None,
        norm: Norms | None = None,
        seed: int | None = None,
    ) -> RolloutBuffer:
        """A buffer for a Gymnasium environment: its spaces, its number of environments and how it resets.

        `obs`, `action` and `autoreset` replace what the environment says.
        """
        settings = settings_of(env, obs, action, autoreset)
        return cls(
            num_steps,
            settings.num_envs,
            settings.obs,
            settings.action,
            reward=reward,
            value=value,
            extra=extra,
            autoreset=settings.autoreset,
            device=device,
            stats=stats,
            norm=norm,
            seed=seed,
        )

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
            row = self._num_stored
            if row == self.num_steps:
                raise self._one_too_many()
            if final_obs is not None and self.autoreset is AutoresetMode.NEXT_STEP:
                remedy = "Leave it out: the row after an end holds the final observation."
                raise SchemaError(
                    explain("final_obs", "None under autoreset=NEXT_STEP", type(final_obs).__name__, remedy)
                )
            finals = None
            if final_obs is not None:
                cut_off = self._resets.cut_off(row, terminated, truncated, self._staged)
                finals = self._finals.among(row, final_obs, cut_off)
            values = (obs, action, reward, terminated, truncated, value, log_prob)
            if self._is_plain and not (extra or self._staged):  # a call costs more than the copy of a small step
                if (value is None) is self._gives_value or (log_prob is None) is self._gives_log_prob:
                    self._check_given(row, value, log_prob)
                self._storage.write(row, values)
            else:
                self._check_given(row, value, log_prob)
                self._writer.write(row, values, extra)
            self._commit(row, None if row else self._given(value, log_prob), finals)

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
            row = self._num_stored
            if row == self.num_steps:
                raise self._one_too_many()
            refuse_reused(self._schema, obs, next_obs)
            measured = self._listeners.measured(info, self._storage.lead, self.autoreset)
            finals = None
            if self.autoreset is not AutoresetMode.NEXT_STEP:
                cut_off = self._resets.cut_off(row, terminated, truncated, self._staged)
                finals = self._finals.of_step(row, parts, cut_off, self.autoreset)
            self._check_given(row, value, log_prob)
            self._writer.write(row, (obs, action, reward, terminated, truncated, value, log_prob), extra)
            self._commit(row, None if row else self._given(value, log_prob), finals, measured)

    def stage(self, **fields: Any) -> None:
        """Copy some fields of the coming step now, before the environment overwrites them; `add` gives the others."""
        with self._lock:
            row = self._num_stored
            if row == self.num_steps:
                raise self._one_too_many()
            if row and self._columns.missing:
                for name in fields:
                    if name in self._columns.missing:
                        raise _differs(name, first=False)
            self._writer.stage(row, fields)

    def lend(self) -> TensorDict:
        """All of the memory as a TensorDict `[N, T + 1]`, for a collector that writes steps there itself.

        `take_back` makes what it wrote the stored steps.
        """
        with self._lock:
            refuse_sparse(self._schema, "a rollout that is lent")
            return self._columns.env_major(self.num_steps, attached=False)

    def take_back(self, num_steps: int | None = None) -> None:
        """Make the first `num_steps` rows of the memory (all by default), written through `lend()`, the stored steps.

        Every field counts as given, and the row after them holds the last observation and value. What was attached is
        forgotten; statistics are told of the steps that were not stored before.
        """
        count = self.num_steps if num_steps is None else num_steps
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or not 0 <= count <= self.num_steps:
            remedy = "Pass the number of rows that were written."
            raise SchemaError(explain("take_back", f"0 to {self.num_steps} steps", repr(count), remedy))
        count = int(count)
        with self._lock:
            refuse_sparse(self._schema, "a rollout that is lent")
            self._storage.follow()
            self._storage.make_flags()
            self._last = None  # the collector may have written a newer one
            for row in range(self._num_stored, count if self._listeners.columns else 0):
                self._tell(row, self._listeners.columns, _NOTHING)
            self._empty()
            self._expect(value=True, log_prob=True)
            self._num_stored = count
            if self.autoreset is AutoresetMode.NEXT_STEP:
                self._coming = light(self._resets.rows(count + 1)[-1:])
            self._last = self._columns.row("value", count), self._columns.row("obs", count)

    def clear(self, *, restarted: bool = False) -> None:
        """Forget the stored steps and what was attached; the environments' pending resets are remembered.

        Statistics are of the environments, not of what is stored: episodes that are running go on in the next rollout.
        `restarted=True` says that `env.reset()` was called on all of them since, so that no reset row is coming and the
        running episodes will not be finished.
        """
        with self._lock:
            if restarted:
                self._resets.restarted()
                self._listeners.restarted()
            elif self._num_stored:
                self._resets.go_on(self._num_stored)
            self._empty()

    def save(self, path: str | PathLike[str], *, keep: int = 2) -> int:
        """Write a checkpoint below the folder `path`, whole or not at all, and return its number.

        The newest `keep` checkpoints stay. What is saved is everything: rows, what is attached or staged, final
        observations, hidden states, pending resets, statistics, norms and the generator. `relive.load(path)` goes on
        from it exactly.
        """
        from relive.checkpoint import save  # noqa: PLC0415 (checkpoints know every buffer)

        return save(self, path, keep=keep)

    def _empty(self) -> None:
        self._generation += 1
        self._num_stored = 0
        self._staged.clear()
        self._finals.clear()
        self._carries.begin(self._resets.resetting)
        self._attached.clear()
        self._last: tuple[list[torch.Tensor], list[torch.Tensor] | None] | None = None
        """The last value and observation that the row after the stored ones holds."""
        self._coming = light(self._resets.resetting.clone().unsqueeze(0))
        """Which environments only reset in the coming row [1, N], for those who are told of it."""

    def _one_too_many(self) -> BufferFullError:
        remedy = "Train on the rollout, then clear() it."
        return BufferFullError(explain("add", f"at most {self.num_steps} steps", self.num_steps + 1, remedy))

    def _check_given(self, row: int, value: Any, log_prob: Any) -> None:
        """Refuse a step that gives other optional fields than the first one, whose choice it is."""
        has_value, has_log_prob = self._given(value, log_prob)
        if row and has_value is not self._gives_value:
            raise _differs("value", self._gives_value)
        if row and has_log_prob is not self._gives_log_prob:
            raise _differs("log_prob", self._gives_log_prob)

    def _given(self, value: Any, log_prob: Any) -> tuple[bool, bool]:
        """Whether a step gives a value and a log_prob, now or staged."""
        return value is not None or "value" in self._staged, log_prob is not None or "log_prob" in self._staged

    def _expect(self, value: bool, log_prob: bool) -> None:
        """Let these optional fields be what every step gives."""
        self._gives_value, self._gives_log_prob = value, log_prob
        given = {"value": value, "log_prob": log_prob}
        self._columns.missing = missing = frozenset(name for name, one in given.items() if not one)
        paths = self._schema.paths
        self._told = [i for i in self._listeners.columns if paths[i][0] not in missing]
        """Which columns of a step those who listen are told."""

    def _commit(
        self, row: int, given: tuple[bool, bool] | None, finals: Found | None, measured: Mapping[str, Any] = _NOTHING
    ) -> None:
        """Make the written row part of the rollout; until here nothing has changed for anybody.

        `given` are the optional fields that the first step gives.
        """
        expected = self._gives_value, self._gives_log_prob
        if given is not None:
            self._expect(*given)
        if self._listeners.columns:
            try:
                self._tell(row, self._told, measured)
            except BaseException:
                self._expect(*expected)
                raise
        if finals is not None:
            self._finals.keep(finals)
        if self._staged or self._attached:
            self._staged.clear()
            self._attached.clear()
        self._last = None
        if self._carries.columns:
            self._carries.keep(row, self._storage.columns, self._resets.ended(row))
        self._num_stored = row + 1

    def _tell(self, row: int, columns: Iterable[int], measured: Mapping[str, Any]) -> None:
        block = {i: self._storage.array(i, row) for i in columns}
        mask = ~self._coming if self.autoreset is AutoresetMode.NEXT_STEP else None
        try:
            self._listeners.tell(block, mask, measured)
        except BaseException:
            if self._last is not None and not self._staged:
                self._write_last()
            raise
        if mask is not None:
            self._coming = self._listeners.ended(block) & mask

    # Targets

    @property
    def final_obs(self) -> Any:
        """The true final observations [K, …] of truncated steps whose next value is not in the buffer, by t·N + n.

        What `final_value` of `compute_advantage` is the critic's value of. Under NEXT_STEP there are none: the row
        after an end is the final observation.
        """
        with self._lock:
            return self._finals.obs

    @answers
    def compute_advantage(
        self,
        last_value: Any,
        *,
        last_obs: Any = None,
        final_value: Any = None,
        gamma: float = 0.99,
        lam: float = 0.95,
        bootstrap_truncated: bool | Literal["own_value"] = True,
    ) -> None:
        """Attach "advantage" and "return": generalised advantage estimation over the stored steps (see `gae`).

        `last_value` [N] is the value of the observation after the last step. `final_value` [K] is the value of
        `final_obs`. `bootstrap_truncated=False` counts truncated steps as ends instead. `"own_value"` is for simulators
        that never reveal the final observation: where the next value is unknown, the value of the step's own
        observation stands for it. That is biased, by the discounted difference of the two values. With a dict of agents
        all of them are dicts, and every agent's advantages are estimated from its own rewards and values.
        """
        with self._lock:
            steps = self._whole("compute_advantage")
            self._advantages.require(steps, "value" not in self._columns.absent)
            lead = self._storage.lead
            last = [value.clone() for value in self._advantages.values("last_value", last_value, lead)]
            obs = None
            if last_obs is not None:
                leaves = observation(self._schema, last_obs, lead, self.device, prefix="last_")
                obs = [leaf.clone() for leaf in leaves]
            targets = self._advantages.estimated(
                steps, last, final_value, bootstrap=bootstrap_truncated, gamma=gamma, lam=lam
            )
            self._last = last, obs
            self._write_last()
            self._columns.attach(targets, steps)

    def _write_last(self) -> None:
        assert self._last is not None
        (last, obs), row = self._last, self._num_stored
        self._storage.zero(row)
        self._storage.write(row, tuple(last), self._schema.columns["value"])
        if obs is not None:
            self._storage.write(row, tuple(obs), self._schema.columns["obs"])

    def attach(self, named: Mapping[str, Any] | None = None, /, **fields: Any) -> None:
        """Let further tensors `[T, N, …]`, or dicts of them, join every batch until `clear()`; they are copied.

        A `value` or `log_prob` that the steps did not give may be among them. Adding another step forgets them all.
        """
        with self._lock:
            steps = self._stored("attach")
            trees = [*({} if named is None else named).items(), *fields.items()]
            self._columns.attach(attachable(trees, steps, self._storage, self._columns.given), steps)

    # Reading

    @answers
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
            chosen = self._columns.selected(fields)
            columns = list(chosen.values())
            total = rows if isinstance(rows, int) else len(rows)
            stop = read_in_batches("minibatches", total, batch_size, drop_last, f"{batch_size} transitions")
            items = self._num_rows()
            source = self._columns.following(columns, lambda: reader(columns, 2, items))
        if out is None:
            read = read_fresh(source, list(chosen), True)
        else:
            read = read_into(out, source, chosen, self.device, batch_size, stop)
        order = order_of(rows, shuffle, self._random, self.device)
        batches = self._batches(read, order, batch_size, stop, epochs, generation)
        return batches if target is None else (moved(batch, target) for batch in batches)

    def _batches(
        self, read: Read, order: Callable[[], torch.Tensor], size: int, per_epoch: int, epochs: int, generation: int
    ) -> Iterator[TensorDict]:
        index = None
        for start in itertools.chain.from_iterable(itertools.repeat(range(0, per_epoch, size), epochs)):
            with self._lock:
                if self._generation != generation:
                    remedy = "Finish the epochs before clear()."
                    raise NotReadyError(
                        explain("batch", "the rollout that the epochs began with", "a cleared one", remedy)
                    )
                if index is None or start == 0:
                    index = order()
                batch = read(index, start, min(start + size, per_epoch))
            yield batch

    def _valid_rows(self) -> torch.Tensor | int:
        """The flat rows t·N + n that are transitions; a number: all below it."""
        mask = self._resets.mask(self._num_stored)
        return self._num_rows() if mask is None else mask.flatten().nonzero().squeeze(1)

    def _num_rows(self) -> int:
        return self._num_stored * (self.num_envs or 1)

    @answers
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
            chosen, carried = self._columns.of_sequences(fields)
            columns = [*chosen.values(), *(each.items for each in carried.values())]
            resets = self._resets
            ends = resets.flag("terminated"), resets.flag("truncated")
            flags = Flags(steps, *ends, resets.mask(steps), resets.starting)
            index = find_sequences(flags, cuts, natively=kernels.reads_natively(columns))
            size = max(len(index), 1) if batch_size is None else positive("batch_size", batch_size)
            stop = read_in_batches("sequences", len(index), size, drop_last, f"{size} or more sequences")
            read_of = (index, length or max(index.longest, 1), layout, list(chosen.values()), list(carried.values()))
            source = self._columns.following(columns, lambda: sequence_reader(*read_of))
        paths = [*chosen, ("is_first",), ("batch_sizes" if layout == "packed" else "mask",), ("index",), *carried]
        # What is [L, B] or packed, and what is [B], have no leading axis in common.
        read = read_fresh(source, paths, layout == "batch_first")
        order = order_of(len(index), shuffle, self._random, self.device)
        batches = self._batches(read, order, size, stop, epochs, generation)
        return batches if target is None else (moved_sequences(batch, target) for batch in batches)

    @property
    def data(self) -> TensorDict:
        """The stored steps as a TensorDict `[T, N]` sharing the buffer's memory, with "mask" and what is attached."""
        with self._lock:
            steps = self._stored("data")
            mask = self._resets.mask(steps)
            if mask is None:
                mask = torch.ones((steps, self.num_envs or 1), dtype=torch.bool, device=self.device)
            return self._columns.shared(steps, mask)

    @property
    def columns(self) -> TensorDict:
        """The whole memory as a TensorDict `[num_steps, N]`, with what is attached.

        It has every declared field, given or not. Beyond the `num_stored` first rows there are zeros, or an older
        rollout. For learning there is `data`.
        """
        with self._lock:
            return self._columns.memory(self.num_steps)

    def env_major(self) -> TensorDict:
        """The rollout as a TensorDict `[N, T + 1]` that shares the buffer's memory.

        The last slot holds `last_obs` and `last_value` of `compute_advantage`; its other fields are zero, and so are
        these before it.
        """
        with self._lock:
            steps = self._whole("env_major")
            if self._last is None:
                self._storage.zero(steps)
            return self._columns.env_major(steps)

    def __getitem__(self, name: str | Path) -> Any:
        """One field of the stored steps `[T, N, …]`, sharing the buffer's memory."""
        if not isinstance(name, str | tuple):
            remedy = "A step is rollout.data[t], a batch comes from minibatches."
            raise TypeError(explain("rollout[...]", "the name of a field", repr(name), remedy))
        data = self.data
        try:
            return data[name]
        except KeyError:
            first = name if isinstance(name, str) else name[0]
            if first in self._columns.absent:
                raise KeyError(absence_of(first)) from None
            known = ", ".join(map(str, data.keys()))
            raise KeyError(explain("rollout", f"one of {known}", repr(name), "See rollout.data.")) from None

    def __contains__(self, name: object) -> bool:
        """Whether there is such a field, or path to a leaf: a `value` or `log_prob` only if the steps gave it."""
        path = name if isinstance(name, tuple) else (name,)
        with self._lock:
            leaves = (*self._columns.leaves(), ("mask",)) if self._num_stored else ()
        return any(leaf[: len(path)] == path for leaf in leaves)

    def __iter__(self, *_indices: Any) -> NoReturn:
        """Raises a TypeError that names what to loop over."""
        remedy = "Loop over minibatches(batch_size) or sequences(length); rollout.data has the steps."
        raise uniterable(self, remedy)

    __getitems__ = __iter__  # torch's DataLoader asks for a batch by it

    def check(self) -> None:
        """Verify every invariant; raises an InvariantError for the first thing that is wrong, and changes nothing."""
        with self._lock:
            check_rollout(self)
            self._listeners.check()
            self._random.check()

    def __len__(self) -> int:
        """The number of stored transitions; rows that only reset do not count."""
        with self._lock:
            mask = self._resets.mask(self._num_stored) if self._num_stored else None
            return self._num_rows() if mask is None else int(mask.sum())

    def __repr__(self) -> str:
        return (
            f"RolloutBuffer({self.num_stored} of {self.num_steps} steps, num_envs={self.num_envs}, "
            f"fields=({', '.join(self._schema.names)}), device={str(self.device)!r})"
        )

    def _repr_html_(self) -> str:
        facts = {
            "steps": f"{self.num_stored:,} of {self.num_steps:,}",
            "environments": self.num_envs,
            "transitions": f"{len(self):,}",
            "attached": ", ".join(map(".".join, self._attached)) or None,
            "autoreset": None if self.autoreset is None else self.autoreset.name,
            "memory": f"{size_told(self.nbytes)} on {self.device}",
        }
        return buffer_card("RolloutBuffer", facts.items(), self._schema)

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
            return self._columns.nbytes

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
            raise NotReadyError(
                explain(where, "complete steps", f"a step with staged {', '.join(sorted(self._staged))}", remedy)
            )
        return self._stored(where)

    def _stored(self, where: str) -> int:
        if not self._num_stored:
            raise NotReadyError(explain(where, "at least 1 stored step", 0, "Add steps first."))
        return self._num_stored


def _differs(name: str, first: bool) -> SchemaError:
    expected, got = ("one, as the first step gave", "none") if first else ("none, as at the first step", "one")
    remedy = f"Pass {name}= to every step of a rollout, or to none."
    return SchemaError(explain(name, expected, got, remedy))
