"""What if that had been the goal: steps relabelled with goals that their own episode reached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from relive import lazy
from relive.errors import SchemaError, explain
from relive.fields.assembly import assemble
from relive.fields.conversion import convert, path_name
from relive.fields.schema import Field, Path, require_share
from relive.fields.vocabulary import suggests_init_keywords
from relive.kernels.torch_ops import wide
from relive.randomness import Randomness
from relive.replay.composed import flat_steps_of, in_windows
from relive.replay.store import Leaves, ReplayStore
from relive.replay.views.protocol import require_order
from relive.replay.views.transition import Transition

Relabel = Callable[[torch.Tensor, torch.Tensor, "lazy.TensorDict"], tuple[torch.Tensor, torch.Tensor]]
"""fn(achieved_next [M, …], goal [M, …], rows [M]) → (reward [M], terminated [M]).

It is given every step that is read, also padding and those that keep their goal; what it says of these does not count.
"""


_TRANSITION = Transition()


class Steps(Protocol):
    """A view that can be built from steps somebody else has changed."""

    def windows(self, store: ReplayStore, slots: torch.Tensor) -> torch.Tensor: ...

    def reduce(self, store: ReplayStore, slots: torch.Tensor, windows: torch.Tensor, steps: Leaves) -> Leaves: ...


@suggests_init_keywords
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
        view: what is read around each row: `Transition`, `NStep`, `Sequence` or `Window`.
    """

    goal: str | Path
    achieved: str | Path
    fn: Relabel
    ratio: float = 0.8
    strategy: Literal["future", "final", "episode"] = "future"
    view: Steps = _TRANSITION

    def __post_init__(self) -> None:
        require_share("Hindsight.ratio", self.ratio)
        if self.strategy not in ("future", "final", "episode"):
            remedy = "Pass one of them."
            raise SchemaError(explain("Hindsight.strategy", '"future", "final" or "episode"', self.strategy, remedy))

    def check(self, store: ReplayStore) -> None:
        """Refuse a buffer whose rows are in no order, and leaves that are no goals."""
        require_order(store, self)
        goal, achieved = (_field(store, _leaf(store, name)) for name in (self.goal, self.achieved))
        if goal != achieved:
            remedy = "Declare goal and achieved goal alike."
            raise SchemaError(explain("Hindsight", f"an achieved goal like {goal}", achieved, remedy))

    def read(self, store: ReplayStore, slots: torch.Tensor, random: Randomness) -> Leaves:
        goal, achieved = _leaf(store, self.goal), _leaf(store, self.achieved)
        windows = self.view.windows(store, slots)
        steps = flat_steps_of(store, windows)
        chosen = random.uniform(len(slots), slots.device) < self.ratio
        wanted = self._goals(store, slots, achieved, random)
        changed = (chosen.unsqueeze(1) & (windows >= 0)).flatten()
        goals = wanted if windows.shape[1] == 1 else wanted.repeat_interleave(windows.shape[1], 0)
        self._relabel(store, steps, changed, goals, goal, achieved)
        return self.view.reduce(store, slots, windows, in_windows(steps, windows.shape))

    def _goals(self, store: ReplayStore, slots: torch.Tensor, achieved: Path, random: Randomness) -> torch.Tensor:
        """The achieved goal after one step of each row's episode [B, …]."""
        ahead = store.ahead(slots)
        if self.strategy == "future":
            offset = random.below(ahead + 1, len(slots))
        elif self.strategy == "final":
            offset = ahead
        else:
            preceding = store.preceding(slots)
            offset = random.below(ahead + preceding + 1, len(slots)) - preceding
        leaf = store.schema.paths.index(achieved)
        return store.take(store.later(slots, offset + 1), (leaf,))[0]

    def _relabel(
        self,
        store: ReplayStore,
        steps: Leaves,
        changed: torch.Tensor,
        goals: torch.Tensor,
        goal: Path,
        achieved: Path,
    ) -> None:
        """Give the steps [M, …] that are `changed` their new goal, and what reward and end come of it."""
        wide_changed = wide(changed, goals)
        for path in (goal, ("next_obs", *goal[1:])):
            steps[path] = torch.where(wide_changed, goals, steps[path])
        rows = assemble(steps, torch.Size((len(changed),)))
        results = self.fn(steps[("next_obs", *achieved[1:])], steps[goal], rows)
        if not isinstance(results, tuple) or len(results) != 2:
            remedy = "Return a tuple of both."
            raise SchemaError(explain("Hindsight.fn", "(reward, terminated)", type(results).__name__, remedy))
        for name, result in zip(("reward", "terminated"), results, strict=True):
            leaves = store.schema.flatten(name, result, f"Hindsight.fn: {name}")
            for i, leaf in zip(store.schema.leaf_indices[name], leaves, strict=True):
                path, field = store.schema.paths[i], store.schema.fields[i]
                if leaf is steps[path]:  # as it was
                    continue
                where = f"Hindsight.fn: {path_name(path)}"
                new = convert(where, field, leaf, (len(changed),), store.device, unit="rows")
                steps[path] = torch.where(wide(changed, new), new, steps[path])


def _field(store: ReplayStore, path: Path) -> Field:
    return store.schema.fields[store.schema.paths.index(path)]


def _leaf(store: ReplayStore, name: str | Path) -> Path:
    path = (
        ("obs", name) if isinstance(name, str) and name != "obs" else (name,) if isinstance(name, str) else tuple(name)
    )
    known = [store.schema.paths[i] for i in store.memory.observed]
    if path not in known:
        names = ", ".join(".".join(p) for p in known)
        raise SchemaError(
            explain("Hindsight", f"a leaf of the observation ({names})", ".".join(path), "Name one of them.")
        )
    return path
