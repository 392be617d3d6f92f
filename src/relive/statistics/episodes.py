"""How well it goes: returns, lengths, metrics and ends of the last finished episodes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from relive import kernels
from relive.checkpoint.snapshot import SnapshotReader, State
from relive.checkpoint.state_dict import packed, unpacked
from relive.errors import SchemaError, explain
from relive.fields.conversion import convert, device_of, env_numbers, numpy_view, restored_snapshot
from relive.fields.invariants import require, require_all, require_form
from relive.fields.schema import FLAG, NUMBER, Field, positive
from relive.fields.vocabulary import suggests_keywords
from relive.storage.allocator import require_memory

_FITS = {torch.float64: {np.dtype(np.float32), np.dtype(np.float64)}, torch.bool: {np.dtype(np.bool_)}}
"""What needs no conversion on the host."""
_MOST_STEPS = 2**53
"""Up to here float64 counts exactly."""
_MOMENTS = {"mean": np.mean, "std": np.std, "min": np.min, "max": np.max}


class EpisodeStats:
    """The last `window` finished episodes of `num_envs` environments, in the order of time, then environment.

    A return is a team's: buffers add up the rewards of several agents. What one agent gets may be a metric.

    Args:
        num_envs: environments that are counted. None is one environment without an environment axis.
        window: how many of the newest episodes the summary is about.
        metrics: names of numbers of a step that are summed over the episode, as rewards are.
        reasons: names of the reasons why episodes end.
        device: where the counts are kept.

    >>> stats = EpisodeStats(num_envs=2, reasons=("fall",))
    >>> stats.update([1.0, 5.0], terminated=[False, False], truncated=[False, False])
    >>> stats.update([2.0, 5.0], terminated=[True, False], truncated=[False, False], reasons=["fall", None])
    >>> summary = stats.summary()
    >>> summary["return_mean"], summary["length_mean"], summary["fall_rate"], summary["episodes"]
    (3.0, 2.0, 1.0, 1.0)
    """

    @suggests_keywords
    @torch.inference_mode(False)  # the memory is written later, in whatever mode
    def __init__(
        self,
        num_envs: int | None,
        window: int = 100,
        metrics: Iterable[str] = (),
        reasons: Iterable[str] = (),
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_envs = None if num_envs is None else positive("num_envs", num_envs)
        self.window = positive("window", window)
        self.metrics, self.reasons = _names("metrics", metrics), _names("reasons", reasons)
        _check_names(self.metrics, self.reasons)
        self._sums = ("return", "length", *self.metrics)
        self._columns = ("step", *self._sums, "terminated", *self.reasons)
        self._lead = () if self.num_envs is None else (self.num_envs,)
        self._lock = threading.Lock()
        device, envs = device_of(device), self.num_envs or 1
        nbytes = 8 * (len(self._sums) * envs + len(self._columns) * (self.window + 1))
        require_memory(nbytes, "EpisodeStats", "Lower num_envs or window.")
        # float64: a return keeps its digits over long episodes, and every count is exact.
        tensors = {
            "open": torch.zeros((len(self._sums), envs), dtype=torch.float64, device=device),
            # One row more than the window: what is written there is written nowhere, and needs no synchronisation.
            "ring": torch.zeros((self.window + 1, len(self._columns)), dtype=torch.float64, device=device),
            "counts": torch.zeros(2, dtype=torch.int64, device=device),
        }
        self._bind(tensors)

    def __repr__(self) -> str:
        summary = self.summary()
        told = ", ".join(f"{name}={summary[name]:g}" for name in ("return_mean", "length_mean") if name in summary)
        return (
            f"EpisodeStats(num_envs={self.num_envs}, window={self.window}, metrics={self.metrics}, "
            f"reasons={self.reasons}; {summary['episodes']:g} episodes{told and ', '}{told})"
        )

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_lock", "_ops", "_open", "_ring", "_counts", "_none", "_tensors", "_version")
        kept = {name: value for name, value in vars(self).items() if name not in left_out}
        return kept | {"_packed": packed(self.snapshot())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        arrays = unpacked(state.pop("_packed"))
        vars(self).update(state, _lock=threading.Lock())
        self._bind({name: tensor.to(self.device) for name, tensor in arrays.items()})

    def _bind(self, tensors: dict[str, torch.Tensor]) -> None:
        """Keep the counts in other memory; numpy is much faster than torch for few numbers, with the same formulas."""
        device = tensors["open"].device  # "cuda" is "cuda:0"
        ops: Any = _array_library(device)
        none = torch.zeros(self.num_envs or 1, dtype=torch.bool, device=device)
        arrays: Any = [x.numpy() if ops is np else x for x in (*tensors.values(), none)]
        version = object()
        # Assignments without a call: no signal comes between them.
        self._tensors, self.device, self._ops, self._version = tensors, device, ops, version
        self._open, self._ring, self._counts, self._none = arrays

    def _as_array(self, tensor: torch.Tensor) -> Any:
        return tensor.numpy() if self._ops is np else tensor

    # Writing

    def update(
        self,
        reward: Any,
        terminated: Any,
        truncated: Any,
        *,
        mask: Any = None,
        metrics: Mapping[str, Any] | None = None,
        reasons: Mapping[str, Any] | Sequence[str | None] | str | None = None,
    ) -> None:
        """Count one step of every environment; every value is [N].

        Rows where `mask` is False (steps that only reset) are ignored. A metric that is not given adds nothing.
        `reasons` is a flag [N] for each name, or a name or None for each environment; they count where an episode ends.
        An episode that is both terminated and truncated is terminated.
        """
        self._plan([self._step(reward, terminated, truncated, mask=mask, metrics=metrics, reasons=reasons)])()

    def _step(
        self, reward: Any, terminated: Any, truncated: Any, *, mask: Any = None,
        metrics: Mapping[str, Any] | None = None, reasons: Any = None,
    ) -> _Step:  # fmt: skip
        """One step of every environment, checked; see `update`."""
        gained = [self._given("reward", NUMBER, reward), *self._metrics_of(metrics)]
        flags = [self._given("terminated", FLAG, terminated), *self._reasons_of(reasons)]
        ended = flags[0] | self._given("truncated", FLAG, truncated)
        played: Any = 1
        if mask is not None:
            played = self._given("mask", FLAG, mask)
            ended = ended & played
            gained = [self._ops.where(played, x, 0.0) for x in gained]
        return _Step((gained[0], played, *gained[1:]), flags, ended, len(ended) if mask is None else played.sum())

    def _plan(self, steps: Sequence[_Step]) -> PlannedSteps:
        """Steps in time order, to be counted when the plan is called."""
        with self._lock:
            return PlannedSteps(self, steps, self._changed(steps))

    def _changed(self, steps: Sequence[_Step]) -> _Changes:
        """The counts after these steps; the caller holds the lock."""
        running, counts = self._open * 1, self._counts * 1  # copies, of arrays and of tensors
        finished: list[tuple[Any, Any]] = []
        for gained, flags, ended, count in steps:
            if self._ops is np and counts[1] > _MOST_STEPS - len(ended):  # elsewhere nobody looks
                got = f"{int(counts[1])} and {len(ended)} more"
                raise OverflowError(explain("update", "at most 2^53 steps", got, "Call clear()."))
            for i, x in enumerate(gained):
                running[i] += x
            counts[1] += count
            # Looking is free on the host. Elsewhere it would be a synchronisation: all rows go on, and few are kept.
            at: Any = ended.nonzero()[0] if self._ops is np else slice(None)
            if self._ops is torch or len(at):
                finished.append(self._finished_at(at, ended[at], [flag[at] for flag in flags], running, counts))
        return _Changes(self._version, running, counts, finished)

    def _finished_at(self, at: Any, ended: Any, flags: list[Any], running: Any, counts: Any) -> tuple[Any, Any]:
        """The places in the ring, and the rows there, of the episodes that ended in the environments `at`."""
        rank = ended.cumsum(0)
        kept = ended & (rank > rank[-1] - self.window)
        slots = self._ops.where(kept, (counts[0] + rank - 1) % self.window, self.window)
        sums = running[:, at]
        rows = self._ops.stack([counts[1] + 0 * rank, *sums, *flags], 1)
        counts[0] += rank[-1]
        running[:, at] = self._ops.where(ended, 0.0, sums)
        return slots, rows

    def _assign(self, changes: _Changes) -> None:
        self._version = changes
        self._open[:] = changes.running
        for slots, rows in changes.finished:
            self._ring[slots] = rows
        self._counts[:] = changes.counts

    def _given(self, name: str, field: Field, value: Any) -> Any:
        if self._ops is np:
            view = numpy_view(value)
            if type(view) is np.ndarray and view.dtype in _FITS[field.dtype] and view.shape == self._lead:
                view = view if view.dtype != np.bool_ else view.view(np.uint8) != 0  # bytes other than 0 and 1 are true
                return view if view.ndim else view.reshape(1)
        return self._as_array(convert(name, field, value, self._lead, self.device).view(-1))

    def _metrics_of(self, metrics: Mapping[str, Any] | None) -> list[Any]:
        given = _known("metrics", metrics or {}, self.metrics)
        return [self._given(name, NUMBER, given[name]) if name in given else self._none for name in self.metrics]

    def _reasons_of(self, reasons: Any) -> list[Any]:
        given: Any = {} if reasons is None else reasons
        given = _known("reasons", given if isinstance(given, Mapping) else self._flags_of(given), self.reasons)
        return [self._given(name, FLAG, given[name]) if name in given else self._none for name in self.reasons]

    def _flags_of(self, reasons: Sequence[str | None] | str) -> dict[Any, np.ndarray]:
        """A name or None for each environment, as a flag for each name."""
        names = np.asarray(reasons, dtype=object)
        if names.shape != self._lead:
            of = "" if self.num_envs is None else f" for each of {self.num_envs} environments"
            raise SchemaError(
                explain("reasons", f"a name or None{of}", repr(reasons), "Pass names or None in this shape.")
            )
        found = {name for name in names.reshape(-1).tolist() if name is not None}
        return {name: np.asarray(names == name, dtype=np.bool_) for name in found}

    def cut(self, env_ids: Any = None) -> None:
        """The running episodes were abandoned (of these environments, or of all): they will never be finished."""
        at = slice(None) if env_ids is None else self._as_array(env_numbers(env_ids, self.num_envs, self.device))
        with self._lock:
            self._version = object()
            self._open[:, at] = 0.0

    def clear(self) -> None:
        """Forget all episodes, the running ones too."""
        with self._lock:
            self._bind({name: torch.zeros_like(tensor) for name, tensor in self._tensors.items()})

    # Reading

    @property
    def num_episodes(self) -> int:
        """How many episodes have finished since the start or the last `clear()`."""
        return int(self._counts[0])

    @property
    def num_steps(self) -> int:
        """How many steps have been counted, in all environments together."""
        return int(self._counts[1])

    def episodes(self) -> dict[str, torch.Tensor]:
        """The window, oldest first: "step", "return", "length", metrics, "terminated", "truncated" and reasons [E].

        "step" is how many steps had been counted in all environments when the episode ended: the x of a learning curve.
        """
        with self._lock:
            columns = dict(zip(self._columns, self._finished().unbind(1), strict=True))
        columns["truncated"] = columns["terminated"] == 0
        kinds = {"step": torch.int64, "length": torch.int64, **dict.fromkeys(("terminated", *self.reasons), torch.bool)}
        return {name: column.to(kinds.get(name, column.dtype)) for name, column in columns.items()}

    def summary(self) -> dict[str, float]:
        """Numbers to log, over the window: `<what>_mean`, `_std` (of the population), `_min`, `_max`, and rates.

        What: "return", "length" and each metric, and the same per step of an episode as "step_reward" and
        "step_<metric>". Rates: "terminated_rate", "truncated_rate" and one for each reason. "episodes" is how many have
        finished in all; before the first one there is nothing else.
        """
        with self._lock:
            total, finished = float(self._counts[0]), self._finished().cpu().numpy()
        if not len(finished):
            return {"episodes": total}
        columns = dict(zip(self._columns, finished.T, strict=True))
        measured = {name: columns[name] for name in self._sums}
        measured["step_reward"] = columns["return"] / columns["length"]
        measured |= {f"step_{name}": columns[name] / columns["length"] for name in self.metrics}
        moments = {f"{name}_{kind}": float(of(x)) for name, x in measured.items() for kind, of in _MOMENTS.items()}
        rates = {f"{name}_rate": float(columns[name].mean()) for name in ("terminated", *self.reasons)}
        return {"episodes": total, **moments, **rates, "truncated_rate": 1.0 - rates["terminated_rate"]}

    def _finished(self) -> torch.Tensor:
        """The rows of the window, oldest first."""
        ring, total = self._tensors["ring"][:-1], self.num_episodes
        return ring[:total].clone() if total < self.window else ring.roll(-(total % self.window), 0)

    def check(self) -> None:
        """Verify that what is counted fits together; returns and metrics may be any numbers that were told."""
        with self._lock:
            envs, columns = self.num_envs or 1, len(self._columns)
            shapes = {"open": (len(self._sums), envs), "ring": (self.window + 1, columns), "counts": (2,)}
            for name, tensor in self._tensors.items():
                dtype = torch.int64 if name == "counts" else torch.float64
                require_form(f"stats: {name}", tensor, shapes[name], dtype, self.device)
            if self.device.type != "meta":  # which has no values to look at
                self._check_counts()

    def _check_counts(self) -> None:
        episodes, steps = self._tensors["counts"].tolist()
        require(0 <= episodes <= steps, "stats: episodes", f"0 to {steps}, the steps", episodes)
        require(steps <= _MOST_STEPS, "stats: steps", "at most 2^53", steps)
        running, finished = self._tensors["open"][1], self._finished()
        require_all(
            (running >= 0) & (running == running.floor()), "stats: running length", "a whole number of steps", running
        )
        step, length, flags = finished[:, 0], finished[:, 2], finished[:, 1 + len(self._sums) :]
        whole = (length >= 1) & (length == length.floor()) & (length <= step)
        require_all(whole, "stats: length", "a whole number of the counted steps", length)
        require_all(step.diff() >= 0, "stats: step", "steps in order of time", step)
        require_all(step <= steps, "stats: step", f"at most {steps}, the steps", step)
        require_all((flags == 0) | (flags == 1), "stats: ends", "flags of 0 or 1", flags)
        played = float(running.sum() + length.sum())
        require(played <= steps, "stats: steps", f"at least the {played:.0f} of the episodes", steps)
        rest = self._tensors["ring"][episodes : self.window]
        require_all(rest == 0, "stats: window", "0 after the last episode", rest)

    # Moving and saving

    def to(self, device: torch.device | str) -> EpisodeStats:
        """Move to another device, where the coming steps will be; returns itself."""
        there = device_of(device)
        with self._lock:
            self._bind({name: tensor.to(there) for name, tensor in self._tensors.items()})
        return self

    def config(self) -> dict[str, Any]:
        """How equal statistics of as many environments are made, as JSON."""
        return {"window": self.window, "metrics": list(self.metrics), "reasons": list(self.reasons)}

    def state(self) -> State:
        """Everything that steps change, as tensors of its own."""
        return State({}, self.snapshot())

    def load_state(self, saved: SnapshotReader) -> None:
        """Continue from a saved state of statistics with the same arguments."""
        with self._lock:
            self._bind(saved.arrays_like(self._tensors))

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Everything that steps change, as tensors of its own."""
        with self._lock:
            return {name: tensor.clone() for name, tensor in self._tensors.items()}

    def restore(self, snapshot: Mapping[str, torch.Tensor]) -> None:
        """Go back to a snapshot, of these statistics or of others with the same arguments."""
        with self._lock:
            self._bind(restored_snapshot("EpisodeStats", snapshot, self._tensors))


def plan_steps(stats: EpisodeStats, steps: Iterable[Mapping[str, Any]]) -> PlannedSteps:
    """Steps in time order, each the arguments of `update`, to be counted when the plan is called."""
    return stats._plan([stats._step(**step) for step in steps])


class _Step(NamedTuple):
    """One step of every environment."""

    gained: tuple[Any, ...]
    """Amounts that are added to each sum of the running episodes."""
    flags: list[Any]
    ended: Any
    count: Any
    """How many environments took it."""


class _Changes(NamedTuple):
    """Statistics as they will be."""

    version: object
    """The statistics that they are computed from."""
    running: Any
    counts: Any
    finished: list[tuple[Any, Any]]
    """Places in the ring, and the rows there."""


class PlannedSteps:
    """Steps that are counted once, all of them or none, however often this is called: a signal may interrupt it."""

    def __init__(self, stats: EpisodeStats, steps: Sequence[_Step], changes: _Changes) -> None:
        self._stats, self._steps, self._changes = stats, steps, changes
        self._is_done = False

    def __call__(self) -> None:
        with self._stats._lock:
            if self._is_done:
                return
            if self._changes.version is not self._stats._version:  # somebody else has changed them since
                self._changes = self._stats._changed(self._steps)
            kernels.complete(self._assign)

    def _assign(self) -> None:
        self._stats._assign(self._changes)
        self._is_done = True


def _array_library(device: torch.device) -> Any:
    return np if device.type == "cpu" else torch


def _names(where: str, names: Iterable[str]) -> tuple[str, ...]:
    given = tuple(names)
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in given):
        raise SchemaError(explain(where, "a tuple of names", repr(names), "Pass strings in a tuple."))
    return given


def _check_names(metrics: tuple[str, ...], reasons: tuple[str, ...]) -> None:
    """Every name of `episodes()` and `summary()` means one thing."""
    names = ["step", "return", "length", "reward", "terminated", "truncated", *metrics, *reasons]
    names += [f"step_{name}" for name in ("reward", *metrics)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SchemaError(explain("EpisodeStats", "distinct names", f"{twice!r} twice", "Rename one."))


def _known(where: str, given: Mapping[str, Any], names: tuple[str, ...]) -> Mapping[str, Any]:
    for name in given:
        if name not in names:
            declared = ", ".join(names) or "none"
            raise SchemaError(explain(where, f"declared names ({declared})", repr(name), f"Declare it in {where}=."))
    return given
