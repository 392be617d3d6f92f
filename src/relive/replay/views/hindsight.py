"""What if that had been the goal: steps relabelled with goals that their own episode reached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Literal, Protocol

import torch
from tensordict import TensorDict

from relive.errors import SchemaError, explain
from relive.fields.batch import assemble
from relive.fields.conversion import conform, dotted
from relive.fields.schema import Field, Path
from relive.fields.vocabulary import worded
from relive.randomness import Randomness
from relive.replay.storage import ReplayStorage
from relive.replay.views.protocol import Leaves, named, named_next, require_order
from relive.replay.views.transition import Transition

Relabel = Callable[[torch.Tensor, torch.Tensor, TensorDict], tuple[torch.Tensor, torch.Tensor]]
"""fn(achieved_next [M, …], goal [M, …], rows [M]) → (reward [M], terminated [M]).

It is given every step that is read, also padding and those that keep their goal; what it says of these does not count.
"""


_TRANSITION = Transition()


class Steps(Protocol):
    """A view that can be built from steps somebody else has changed."""

    def windows(self, storage: ReplayStorage, slots: torch.Tensor) -> torch.Tensor: ...

    def reduce(self, storage: ReplayStorage, slots: torch.Tensor, windows: torch.Tensor, steps: Leaves) -> Leaves: ...


@worded
@dataclass(frozen=True)
class Hindsight:
    """A share `ratio` of the drawn rows pretends that its goal was one that the same episode reached.

    Reward and terminated are recomputed from the state each step led to, for every step that the inner view reads.
    (Andrychowicz et al., Hindsight Experience Replay, 2017.)

    Args:
        goal: the leaf of the observation that holds the goal: a name inside `obs`, or a whole path.
        achieved: the leaf of the observation that holds what was achieved, named likewise.
        fn: fn(achieved_next [M, …], goal [M, …], rows [M]) returns (reward [M], terminated [M]).
        ratio: share of the drawn rows whose goal is replaced, in [0, 1].
        strategy: which achieved goal is taken: of a step from the drawn one on ("future"), of the last step ("final"),
            of any step ("episode"); always the one *after* that step.
        view: what is read around each row: `Transition`, `NStep` or `Sequence`.
    """

    goal: str | Path
    achieved: str | Path
    fn: Relabel
    ratio: float = 0.8
    strategy: Literal["future", "final", "episode"] = "future"
    view: Steps = _TRANSITION

    def __post_init__(self) -> None:
        if isinstance(self.ratio, bool) or not isinstance(self.ratio, Real) or not 0 <= self.ratio <= 1:
            raise SchemaError(explain("Hindsight.ratio", "a number in [0, 1]", repr(self.ratio), "Pass such a number."))
        if self.strategy not in ("future", "final", "episode"):
            remedy = "Pass one of them."
            raise SchemaError(explain("Hindsight.strategy", '"future", "final" or "episode"', self.strategy, remedy))

    def check(self, storage: ReplayStorage) -> None:
        """Refuse a buffer whose rows are in no order, and leaves that are no goals."""
        require_order(storage, self)
        goal, achieved = (_field(storage, _leaf(storage, name)) for name in (self.goal, self.achieved))
        if goal != achieved:
            remedy = "Declare goal and achieved goal alike."
            raise SchemaError(explain("Hindsight", f"an achieved goal like {goal}", achieved, remedy))

    def read(self, storage: ReplayStorage, slots: torch.Tensor, random: Randomness) -> Leaves:
        goal, achieved = _leaf(storage, self.goal), _leaf(storage, self.achieved)
        windows = self.view.windows(storage, slots)
        flat = windows.reshape(-1)
        steps = named(storage, storage.take(flat, padded=True)) | named_next(
            storage, storage.take_next(flat, padded=True)
        )
        chosen = random.uniform(len(slots), slots.device) < self.ratio
        wanted = self._goals(storage, slots, achieved, random)
        changed = (chosen.unsqueeze(1) & (windows >= 0)).flatten()
        goals = wanted.repeat_interleave(windows.shape[1], 0)
        self._relabel(storage, steps, changed, goals, goal, achieved)
        whole = {path: leaf.unflatten(0, windows.shape) for path, leaf in steps.items()}
        return self.view.reduce(storage, slots, windows, whole)

    def _goals(self, storage: ReplayStorage, slots: torch.Tensor, achieved: Path, random: Randomness) -> torch.Tensor:
        """The achieved goal after one step of each row's episode [B, …]."""
        ahead = storage.ahead(slots)
        if self.strategy == "future":
            offset = random.below(ahead + 1, len(slots))
        elif self.strategy == "final":
            offset = ahead
        else:
            behind = storage.behind(slots)
            offset = random.below(ahead + behind + 1, len(slots)) - behind
        column = storage.schema.paths.index(achieved)
        return storage.take(storage.ring.after(slots, offset + 1), (column,))[0]

    def _relabel(
        self,
        storage: ReplayStorage,
        steps: Leaves,
        changed: torch.Tensor,
        goals: torch.Tensor,
        goal: Path,
        achieved: Path,
    ) -> None:
        """Give the steps [M, …] that are `changed` their new goal, and what reward and end come of it."""
        for path in (goal, ("next_obs", *goal[1:])):
            steps[path] = torch.where(_wide(changed, goals), goals, steps[path])
        rows = assemble(steps, torch.Size((len(changed),)))
        results = self.fn(steps[("next_obs", *achieved[1:])], steps[goal], rows)
        if not isinstance(results, tuple) or len(results) != 2:
            remedy = "Return a tuple of both."
            raise SchemaError(explain("Hindsight.fn", "(reward, terminated)", type(results).__name__, remedy))
        for name, result in zip(("reward", "terminated"), results, strict=True):
            leaves = storage.schema.flatten(name, result, f"Hindsight.fn: {name}")
            for i, leaf in zip(storage.schema.columns[name], leaves, strict=True):
                path, field = storage.schema.paths[i], storage.schema.fields[i]
                where = f"Hindsight.fn: {dotted(path)}"
                new = conform(where, field, leaf, (len(changed),), storage.device, unit="rows")
                steps[path] = torch.where(_wide(changed, new), new, steps[path])


def _field(storage: ReplayStorage, path: Path) -> Field:
    return storage.schema.fields[storage.schema.paths.index(path)]


def _leaf(storage: ReplayStorage, name: str | Path) -> Path:
    path = (
        ("obs", name) if isinstance(name, str) and name != "obs" else (name,) if isinstance(name, str) else tuple(name)
    )
    known = [storage.schema.paths[i] for i in storage.observed]
    if path not in known:
        names = ", ".join(".".join(p) for p in known)
        raise SchemaError(
            explain("Hindsight", f"a leaf of the observation ({names})", ".".join(path), "Name one of them.")
        )
    return path


def _wide(flags: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return flags.view(-1, *(1,) * (like.ndim - 1))
