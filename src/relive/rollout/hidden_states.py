"""Hidden states of a rollout that are kept only where a sequence may start."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from relive.errors import SchemaError, explain
from relive.fields.invariants import require, require_all, require_form
from relive.fields.schema import Carry, Schema
from relive.kernels.sequence_index import Cuts
from relive.kernels.sequence_reader import Carried


class SparseCarries:
    """The leaves declared as `Carry(every=k)`: kept at every k-th step of the rollout and of each episode in it.

    These are all the steps where sequences start whose starts lie a multiple of k apart, whether episodes cut them or
    not; memory grows with T / k and the number of episodes.
    """

    def __init__(self, schema: Schema, num_rows: int, num_envs: int, device: torch.device, next_step: bool) -> None:
        self._kept = {
            column: _Kept(field, num_rows * num_envs, device)
            for column, field in enumerate(schema.fields)
            if isinstance(field, Carry) and field.every > 1
        }
        self.columns = tuple(self._kept)
        """Which columns these are; none in most rollouts."""
        self._paths = schema.paths
        self._after_end = -1 if next_step else 0
        # The coming step's place in its episode and among the valid steps of the rollout; -1 is a row that only resets.
        self._in_episode = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self._in_rollout = torch.zeros_like(self._in_episode)

    def begin(self, resetting: torch.Tensor) -> None:
        """A rollout begins; the environments `resetting` [N] reset first."""
        self._in_rollout.zero_()
        self._in_episode = torch.where(resetting, -1, 0)
        for kept in self._kept.values():
            kept.clear()

    def keep(self, row: int, columns: tuple[torch.Tensor, ...], ended: torch.Tensor) -> None:
        """Keep what is due of the newest step, which `columns` hold as their only row."""
        valid = self._in_episode >= 0
        for column, kept in self._kept.items():
            due = valid & ((self._in_episode % kept.every == 0) | (self._in_rollout % kept.every == 0))
            envs = due.nonzero().squeeze(1)
            kept.append(row * len(due) + envs, columns[column][0][envs])
        self._in_rollout += valid
        self._in_episode = torch.where(ended & valid, self._after_end, self._in_episode + 1)

    def saved(self) -> dict[str, torch.Tensor]:
        """Everything that a checkpoint needs to go on from here."""
        if not self.columns:
            return {}
        kept = {f"{column}.{name}": x for column, kept in self._kept.items() for name, x in kept.saved().items()}
        return {"in_episode": self._in_episode, "in_rollout": self._in_rollout, **kept}

    def resume(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Go on from what was saved. A ValueError says what cannot be."""
        if not self.columns:
            return
        own = self.saved()
        forms = [{name: (x.dtype, x.ndim, x.shape[1:]) for name, x in arrays.items()} for arrays in (saved, own)]
        envs = len(self._in_episode)
        if forms[0] != forms[1] or any(len(saved[name]) != envs for name in ("in_episode", "in_rollout")):
            raise ValueError(f"carries: expected arrays like {forms[1]}, got {forms[0]}")
        for column, kept in self._kept.items():
            kept.refuse(saved[f"{column}.rows"], saved[f"{column}.values"])
        for name in ("in_episode", "in_rollout"):
            getattr(self, f"_{name}").copy_(saved[name])
        for column, kept in self._kept.items():
            kept.clear()
            kept.append(*(saved[f"{column}.{name}"].to(self._in_episode.device) for name in ("rows", "values")))

    def check(self, ended: torch.Tensor, valid: torch.Tensor) -> None:
        """Verify that what is kept is what was due, of steps that ended [T, N] and rows that count [T + 1, N]."""
        if not self._kept or ended.device.type == "meta":
            return
        # One row more than there are steps: the coming one.
        none = torch.zeros_like(valid[:1])
        in_rollout = torch.cat([none, valid[:-1]]).cumsum(0)
        after_end = torch.cat([none, ended & valid[:-1]])
        in_episode = in_rollout - torch.where(after_end, in_rollout, 0).cummax(0).values
        for name, found, expected in (
            ("rollout", self._in_rollout, in_rollout[-1]),
            ("episode", self._in_episode, torch.where(valid[-1], in_episode[-1], -1)),
        ):
            require_all(found == expected, f"place in the {name}", f"{expected.tolist()}", found)
        for column, kept in self._kept.items():
            due = (in_episode % kept.every == 0) | (in_rollout % kept.every == 0)
            kept.check(".".join(self._paths[column]), (due & valid)[:-1])

    def require(self, cuts: Cuts) -> None:
        """Refuse sequences that start where nothing was kept."""
        for column, kept in self._kept.items():
            if cuts.length is not None and cuts.stride % kept.every:
                where = f"sequences with {'.'.join(self._paths[column])} kept every {kept.every} steps"
                expected = f"starts at multiples of {kept.every} steps"
                remedy = "Change length or mode, or declare Carry(every=1)."
                raise SchemaError(explain(where, expected, f"a start every {cuts.stride} steps", remedy))

    def kept(self, column: int) -> Carried:
        """A leaf of the rows where sequences start."""
        return self._kept[column].carried()


class _Kept:
    """Some rows of one leaf, in the order they came."""

    def __init__(self, field: Carry, num_rows: int, device: torch.device) -> None:
        self.every, self._field = field.every, field
        self._values = torch.zeros((0, *field.shape), dtype=field.dtype, device=device)
        self._place = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._rows = torch.zeros(0, dtype=torch.int64, device=device)
        """Which rows the values are of."""
        self._count = 0

    def clear(self) -> None:
        self._count = 0

    def check(self, where: str, due: torch.Tensor) -> None:
        """What is kept is that of the steps `due` [T, N], one behind the other."""
        rows = due.flatten().nonzero().squeeze(1)
        require(self._count == len(rows), where, f"{len(rows)} kept rows", self._count)
        shape = (max(self._count, len(self._values)), *self._field.shape)
        require_form(where, self._values, shape, self._field.dtype, due.device)
        place = self._place[rows]
        require_all(place == torch.arange(len(rows), device=due.device), where, "rows in order", place)

    @torch.inference_mode(False)  # what grows now is written later, in whatever mode
    def append(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        count = self._count + len(rows)
        if count > len(self._values):
            size = max(count, 2 * len(self._values))
            self._values, self._rows = (_grown(x, size, self._count) for x in (self._values, self._rows))
        self._values[self._count : count], self._rows[self._count : count] = values, rows
        self._place[rows] = torch.arange(self._count, count, device=rows.device)
        self._count = count

    def refuse(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """A ValueError unless these are rows of the rollout, each with a value."""
        if len(rows) != len(values) or not bool(((rows >= 0) & (rows < len(self._place))).all()):
            got = f"{len(values)} values for {len(rows)} rows, first {rows[:8].tolist()}"
            raise ValueError(f"carries: expected one value for each row, rows below {len(self._place)}, got {got}")

    def carried(self) -> Carried:
        return Carried(self._values, 1, self._place)

    def saved(self) -> dict[str, torch.Tensor]:
        return {"rows": self._rows[: self._count], "values": self._values[: self._count]}


def _grown(tensor: torch.Tensor, size: int, count: int) -> torch.Tensor:
    """A longer tensor with the first `count` rows of this one."""
    grown = tensor.new_zeros((size, *tensor.shape[1:]))
    grown[:count] = tensor[:count]
    return grown
