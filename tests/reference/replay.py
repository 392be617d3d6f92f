"""A replay buffer as lists of dicts: slow, and obviously right."""

from __future__ import annotations

from typing import Any


class Column:
    """One environment: every row ever written, by number. A row is a transition, or None where there is only an obs."""

    def __init__(self, rows: int, next_step: bool, *, keeps_next: bool = False) -> None:
        self.window = rows if keeps_next else rows + 1
        self.next_step, self.keeps_next = next_step, keeps_next
        self.rows: list[dict[str, Any] | None] = []
        self.pending: Any = None
        self.resetting = False
        self.floor = 0

    def add(self, step: dict[str, Any]) -> None:
        if self.resetting:
            self.rows.append(None)  # the row that only resets
            self.resetting, self.pending = False, self._waiting(step)
            return
        if self.pending is not None and self.pending != step["obs"]:
            self.cut()
        self.rows.append(step)
        self.pending = self._waiting(step)
        if step["terminated"] or step["truncated"]:
            if self.next_step:
                self.resetting = True
            else:
                self.cut()

    def _waiting(self, step: dict[str, Any]) -> Any:
        """Return the observation of the next row; None if every row stores its own copy."""
        return None if self.keeps_next else step["next_obs"]

    def cut(self) -> None:
        if self.pending is not None:
            self.rows.append(None)
        self.pending, self.resetting = None, False

    def clear(self) -> None:
        self.floor = len(self.rows)
        self.pending = None

    @property
    def transitions(self) -> dict[int, dict[str, Any]]:
        """The transitions that may be drawn, by row number."""
        newest = len(self.rows) - (self.pending is None)
        oldest = max(self.floor, newest - self.window + 1)
        return {i: row for i, row in enumerate(self.rows) if i >= oldest and row is not None}

    def run(self, row: int, n: int) -> list[dict[str, Any]]:
        """Return up to n transitions of one episode, starting at a row."""
        found = []
        for i in range(row, row + n):
            if i not in self.transitions:
                break
            found.append(self.transitions[i])
        return found

    def run_before(self, row: int, n: int) -> list[dict[str, Any]]:
        """Return up to n transitions of the same episode before a row, oldest first."""
        found: list[dict[str, Any]] = []
        while len(found) < n and row - 1 - len(found) in self.transitions:
            found.append(self.transitions[row - 1 - len(found)])
        return found[::-1]
