"""Episode statistics: returns, lengths, metrics and end reasons of the newest finished episodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from relive import kernels
from relive.errors import SchemaError, explain, verify
from relive.schema.checks import check_positive_int
from relive.schema.conversion import as_device, convert, convert_env_ids
from relive.schema.fields import FLAG_FIELD, NUMBER_FIELD, Field
from relive.schema.invariants import verify_elements, verify_layout
from relive.schema.suggestions import suggests_keywords
from relive.statistics import counting
from relive.storage.allocator import require_host_memory

if TYPE_CHECKING:
    from relive.kernels._native import Counters

_MAX_STEPS = 2**53
"""Largest count that float64 represents exactly."""
_MOMENTS = {"mean": np.mean, "std": np.std, "min": np.min, "max": np.max}


class EpisodeStats(counting.Accumulator):
    """Statistics of the newest `window` finished episodes of `num_envs` environments.

    Buffers sum the rewards of several agents: the return is the team's. Declare the reward of one agent as a metric.

    Args:
        num_envs: number of environments. None is one environment without an environment axis.
        window: number of newest episodes in the summary.
        metrics: names of numbers per step that are summed over the episode, like rewards.
        reasons: names of the reasons why episodes end.
        device: device of the counts.

    >>> stats = EpisodeStats(num_envs=2, reasons=("fall",))
    >>> stats.update([1.0, 5.0], terminated=[False, False], truncated=[False, False])
    >>> stats.update([2.0, 5.0], terminated=[True, False], truncated=[False, False], reasons=["fall", None])
    >>> summary = stats.summary()
    >>> summary["return_mean"], summary["length_mean"], summary["fall_rate"], summary["episodes"]
    (3.0, 2.0, 1.0, 1.0)
    """

    @suggests_keywords
    # Tensors that are made in inference mode could not be written outside it.
    @torch.inference_mode(False)
    def __init__(
        self, num_envs: int | None, window: int = 100, metrics: Iterable[str] = (), reasons: Iterable[str] = (), *,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        self.num_envs = None if num_envs is None else check_positive_int("num_envs", num_envs)
        self.window = check_positive_int("window", window)
        self.metrics, self.reasons = _parse_names("metrics", metrics), _parse_names("reasons", reasons)
        _require_distinct_names(self.metrics, self.reasons)
        self._sums = ("return", "length", *self.metrics)
        self._columns = ("step", *self._sums, "terminated", *self.reasons)
        self._leading_shape = () if self.num_envs is None else (self.num_envs,)
        device, envs = as_device(device), self.num_envs or 1
        nbytes = 8 * (len(self._sums) * envs + len(self._columns) * (self.window + 1))
        require_host_memory(nbytes, "EpisodeStats", "Lower num_envs or window.")
        # In float64 the returns of long episodes are precise, and every count is exact.
        tensors = {
            "open": torch.zeros((len(self._sums), envs), dtype=torch.float64, device=device),
            # The last row is scratch memory for running episodes: selecting only finished ones would synchronise.
            "ring": torch.zeros((self.window + 1, len(self._columns)), dtype=torch.float64, device=device),
            "counts": torch.zeros(2, dtype=torch.int64, device=device),
        }
        self._set_tensors(tensors)

    def __repr__(self) -> str:
        summary = self.summary()
        means = ", ".join(f"{name}={summary[name]:g}" for name in ("return_mean", "length_mean") if name in summary)
        return (
            f"EpisodeStats(num_envs={self.num_envs}, window={self.window}, metrics={self.metrics}, "
            f"reasons={self.reasons}; {summary['episodes']:g} episodes{means and ', '}{means})"
        )

    def _make_counters(self) -> Counters | None:
        """Return native counters of a step with the leaves of `update`: flags, reward, metrics and reasons."""
        dtypes = [field.dtype for field in self._fields.values()]
        metrics = range(3, 3 + len(self.metrics))
        episodes = self, [2], metrics, range(metrics.stop, len(dtypes))
        return counting.make_counters(dtypes, self.num_envs or 1, (0, 1), episodes, ())

    @property
    def _fields(self) -> dict[str, Field]:
        """Fields of a step, in the order of the native counters."""
        numbers, flags = dict.fromkeys(("reward", *self.metrics), NUMBER_FIELD), dict.fromkeys(self.reasons, FLAG_FIELD)
        return {"terminated": FLAG_FIELD, "truncated": FLAG_FIELD, **numbers, **flags}

    def update(
        self, reward: Any, terminated: Any, truncated: Any, *, mask: Any = None,
        metrics: Mapping[str, Any] | None = None,
        reasons: Mapping[str, Any] | Sequence[str | None] | str | None = None,
    ) -> None:  # fmt: skip
        """Count one step of every environment; every value is [N].

        Environments where `mask` is False (dummy steps) are ignored. A missing metric counts as 0. `reasons` is a flag
        [N] per name, or a name or None per environment; it is read where an episode ends. An episode that is both
        terminated and truncated counts as terminated.
        """
        flags = self._convert_reasons(reasons)
        _require_declared_names("reasons", flags, self.reasons)
        _require_declared_names("metrics", metrics or {}, self.metrics)
        values = {"reward": reward, "terminated": terminated, "truncated": truncated, **flags, **(metrics or {})}
        step = {
            name: convert(name, field, values[name], self._leading_shape, self.device).view(1, -1)
            for name, field in self._fields.items()
            if name in values
        }
        is_counted = (
            None if mask is None else convert("mask", FLAG_FIELD, mask, self._leading_shape, self.device).view(1, -1)
        )
        if self._counters is None:
            with counting.lock:
                kernels.complete(self._make_update(step, is_counted))
        else:
            leaves = tuple(map(step.get, self._fields))
            self._counters.count(leaves, 0, 1, None, None if is_counted is None else ~is_counted, None)

    def _make_update(self, values: Mapping[str, torch.Tensor], mask: torch.Tensor | None) -> Callable[[], None]:
        """Return a function that counts steps [T, N] with torch ops; steps where `mask` is False are ignored.

        The caller holds `counting.lock` until it has called the function. Repeated calls count the steps once.
        """
        device, envs = self.device, self.num_envs or 1
        all_false = torch.zeros(envs, dtype=torch.bool, device=device)
        running, counts = self._tensors["open"].clone(), self._tensors["counts"].clone()
        finished_steps: list[tuple[torch.Tensor, torch.Tensor]] = []
        for t in range(len(values["reward"])):
            # Other devices are not checked, because reading the count would synchronise.
            if device.type == "cpu" and counts[1] > _MAX_STEPS - envs:
                got = f"{int(counts[1])} and {envs} more"
                raise OverflowError(explain("update", "at most 2^53 steps", got, "Call clear()."))
            step = {name: column[t] for name, column in values.items()}
            is_counted = ~all_false if mask is None else mask[t]
            for i, increment in enumerate(
                [step["reward"], is_counted, *(step.get(name, all_false) for name in self.metrics)]
            ):
                running[i] += torch.where(is_counted, increment, 0.0)
            counts[1] += is_counted.sum()
            flags = [step["terminated"], *(step.get(name, all_false) for name in self.reasons)]
            ended = (step["terminated"] | step["truncated"]) & is_counted
            # Running episodes are written to the scratch row at the end, because skipping them would synchronise.
            rank = ended.cumsum(0)
            is_new = ended & (rank > rank[-1] - self.window)
            slots = torch.where(is_new, (counts[0] + rank - 1) % self.window, self.window)
            finished_steps.append((slots, torch.stack([counts[1] + 0 * rank, *running, *flags], 1)))
            counts[0] += rank[-1]
            running = torch.where(ended, 0.0, running)

        def change() -> None:
            self._tensors["open"].copy_(running)
            for slots, rows in finished_steps:
                self._tensors["ring"][slots] = rows
            self._tensors["counts"].copy_(counts)

        return change

    def _convert_reasons(self, reasons: Mapping[str, Any] | Sequence[str | None] | str | None) -> Mapping[Any, Any]:
        """Convert reasons, flags by name or a name per environment, to flags [N] by name."""
        if reasons is None or isinstance(reasons, Mapping):
            return reasons or {}
        names = np.asarray(reasons, dtype=object)
        if names.shape != self._leading_shape:
            suffix = "" if self.num_envs is None else f" for each of {self.num_envs} environments"
            remedy = "Pass names or None in this shape."
            raise SchemaError(explain("reasons", f"a name or None{suffix}", repr(reasons), remedy))
        reason_names = {name for name in names.reshape(-1).tolist() if name is not None}
        return {name: np.asarray(names == name, dtype=np.bool_) for name in reason_names}

    def cut(self, env_ids: Any = None) -> None:
        """Drop the running episodes of these environments, or of all environments: they were abandoned."""
        envs = slice(None) if env_ids is None else convert_env_ids(env_ids, self.num_envs, self.device)
        with counting.lock:
            self._tensors["open"][:, envs] = 0.0

    @property
    def num_episodes(self) -> int:
        """Number of episodes finished since the start or the last `clear()`."""
        return int(self._tensors["counts"][0])

    @property
    def num_steps(self) -> int:
        """Number of counted steps, summed over all environments."""
        return int(self._tensors["counts"][1])

    def episodes(self) -> dict[str, torch.Tensor]:
        """Return the episodes of the window, oldest first, in columns [E].

        The columns are "step", "return", "length", metrics, "terminated", "truncated" and reasons. "step" is the number
        of steps of all environments when the episode ended: the x axis of a learning curve.
        """
        with counting.lock:
            columns = dict(zip(self._columns, self._read_finished_rows().unbind(1), strict=True))
        columns["truncated"] = columns["terminated"] == 0
        dtypes = {
            "step": torch.int64,
            "length": torch.int64,
            **dict.fromkeys(("terminated", *self.reasons), torch.bool),
        }
        return {name: column.to(dtypes.get(name, column.dtype)) for name, column in columns.items()}

    def summary(self) -> dict[str, float]:
        """Return numbers to log over the window: `<name>_mean`, `_std` (of the population), `_min`, `_max`, and rates.

        Names: "return", "length" and each metric, and "step_reward" and "step_<metric>" per step of an episode. Rates:
        "terminated_rate", "truncated_rate" and one per reason. "episodes" is the total number of finished episodes;
        before the first one it is the only number.
        """
        with counting.lock:
            total, finished_rows = float(self.num_episodes), self._read_finished_rows().cpu().numpy()
        if not len(finished_rows):
            return _Summary(episodes=total)
        columns = dict(zip(self._columns, finished_rows.T, strict=True))
        measured_columns = {name: columns[name] for name in self._sums}
        measured_columns["step_reward"] = columns["return"] / columns["length"]
        measured_columns |= {f"step_{name}": columns[name] / columns["length"] for name in self.metrics}
        moments = {
            f"{name}_{kind}": float(compute(x))
            for name, x in measured_columns.items()
            for kind, compute in _MOMENTS.items()
        }
        rates = {f"{name}_rate": float(columns[name].mean()) for name in ("terminated", *self.reasons)}
        return _Summary(episodes=total, **moments, **rates, truncated_rate=1.0 - rates["terminated_rate"])

    def _read_finished_rows(self) -> torch.Tensor:
        """Return the rows of the window, oldest first."""
        ring, total = self._tensors["ring"][:-1], self.num_episodes
        return ring[:total].clone() if total < self.window else ring.roll(-(total % self.window), 0)

    def check(self) -> None:
        """Verify that the counts are consistent; returns and metrics may be any numbers."""
        with counting.lock:
            envs, columns = self.num_envs or 1, len(self._columns)
            shapes = {"open": (len(self._sums), envs), "ring": (self.window + 1, columns), "counts": (2,)}
            for name, tensor in self._tensors.items():
                dtype = torch.int64 if name == "counts" else torch.float64
                verify_layout(f"stats: {name}", tensor, shapes[name], dtype, self.device)
            # Tensors on the meta device have no values, so only their layout is checked.
            if self.device.type != "meta":
                self._check_counts()

    def _check_counts(self) -> None:
        episodes, steps = self._tensors["counts"].tolist()
        verify(0 <= episodes <= steps, "stats: episodes", f"0 to {steps}, the steps", episodes)
        verify(steps <= _MAX_STEPS, "stats: steps", "at most 2^53", steps)
        running, finished_rows = self._tensors["open"][1], self._read_finished_rows()
        verify_elements(
            (running >= 0) & (running == running.floor()), "stats: running length", "a whole number of steps", running
        )
        step, length, flags = finished_rows[:, 0], finished_rows[:, 2], finished_rows[:, 1 + len(self._sums) :]
        is_valid_length = (length >= 1) & (length == length.floor()) & (length <= step)
        verify_elements(is_valid_length, "stats: length", "a whole number of the counted steps", length)
        verify_elements(step.diff() >= 0, "stats: step", "steps in order of time", step)
        verify_elements(step <= steps, "stats: step", f"at most {steps}, the steps", step)
        verify_elements((flags == 0) | (flags == 1), "stats: ends", "flags of 0 or 1", flags)
        num_counted = float(running.sum() + length.sum())
        verify(num_counted <= steps, "stats: steps", f"at least the {num_counted:.0f} of the episodes", steps)
        unused_rows = self._tensors["ring"][episodes : self.window]
        verify_elements(unused_rows == 0, "stats: window", "0 after the last episode", unused_rows)

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments, except `num_envs`, as JSON."""
        return {"window": self.window, "metrics": list(self.metrics), "reasons": list(self.reasons)}


class _Summary(dict[str, float]):
    """Numbers of a summary by name; the KeyError for a missing name explains the reason."""

    def __missing__(self, name: str) -> NoReturn:
        if self["episodes"]:
            remedy = "Declare it in metrics or reasons."
            raise KeyError(explain("summary", f"one of {', '.join(self)}", repr(name), remedy))
        remedy = 'Look at summary()["episodes"], or use summary().get(name).'
        raise KeyError(explain(f"summary: {name}", "at least 1 finished episode", 0, remedy))


def _parse_names(where: str, names: Iterable[str]) -> tuple[str, ...]:
    name_tuple = tuple(names)
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in name_tuple):
        raise SchemaError(explain(where, "a tuple of names", repr(names), "Pass strings in a tuple."))
    return name_tuple


def _require_distinct_names(metrics: tuple[str, ...], reasons: tuple[str, ...]) -> None:
    """Raise if two columns of `episodes()` or `summary()` would have the same name."""
    names = ["step", "return", "length", "reward", "terminated", "truncated", *metrics, *reasons]
    names += [f"step_{name}" for name in ("reward", *metrics)]
    repeated_name = next((name for name in names if names.count(name) > 1), None)
    if repeated_name is not None:
        raise SchemaError(explain("EpisodeStats", "distinct names", f"{repeated_name!r} twice", "Rename one."))


def _require_declared_names(where: str, names: Iterable[str], declared: tuple[str, ...]) -> None:
    for name in names:
        if name not in declared:
            expected = f"declared names ({', '.join(declared) or 'none'})"
            raise SchemaError(explain(where, expected, repr(name), f"Declare it in {where}=."))
