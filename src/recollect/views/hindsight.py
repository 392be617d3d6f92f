"""What if that had been the goal: steps relabelled with goals that their own episode reached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from tensordict import TensorDict

from recollect.batch import assemble
from recollect.errors import SchemaError, explain
from recollect.randomness import Randomness
from recollect.replay_storage import ReplayStorage
from recollect.schema import Path
from recollect.views.protocol import Leaves, named, named_next, require_order
from recollect.views.transition import Transition

Relabel = Callable[[torch.Tensor, torch.Tensor, TensorDict], tuple[torch.Tensor, torch.Tensor]]
"""fn(achieved_next [M, …], goal [M, …], rows [M]) → (reward [M], terminated [M])."""


_TRANSITION = Transition()


class Steps(Protocol):
    """A view that can be built from steps somebody else has changed."""

    def windows(self, storage: ReplayStorage, slots: torch.Tensor) -> torch.Tensor: ...

    def reduce(self, steps: Leaves, mask: torch.Tensor) -> Leaves: ...


@dataclass(frozen=True)
class Hindsight:
    """A share `ratio` of the drawn rows pretends that its goal was one that the same episode reached.

    `goal` and `achieved` name leaves of the observation (a name inside `obs`, or a whole path). `strategy` says which
    achieved goal is taken: of a step from the drawn one on ("future"), of the last step ("final"), of any ("episode");
    always the one *after* that step. Reward and terminated are recomputed by `fn` from the state each step led to, for
    every step that the inner view reads. (Andrychowicz et al., Hindsight Experience Replay, 2017.)
    """

    goal: str | Path
    achieved: str | Path
    fn: Relabel
    ratio: float = 0.8
    strategy: Literal["future", "final", "episode"] = "future"
    view: Steps = _TRANSITION

    def __post_init__(self) -> None:
        if isinstance(self.ratio, bool) or not isinstance(self.ratio, int | float) or not 0 <= self.ratio <= 1:
            raise SchemaError(explain("Hindsight.ratio", "a number in [0, 1]", repr(self.ratio), "Pass one."))
        if self.strategy not in ("future", "final", "episode"):
            remedy = "Pass one of them."
            raise SchemaError(explain("Hindsight.strategy", '"future", "final" or "episode"', self.strategy, remedy))

    def read(self, storage: ReplayStorage, slots: torch.Tensor, random: Randomness) -> Leaves:
        require_order(storage, self)
        goal, achieved = _leaf(storage, self.goal), _leaf(storage, self.achieved)
        windows = self.view.windows(storage, slots)
        mask, flat = windows >= 0, windows.reshape(-1)
        steps = named(storage, storage.take(flat, padded=True)) | named_next(
            storage, storage.take_next(flat, padded=True)
        )
        steps = {path: leaf.unflatten(0, windows.shape) for path, leaf in steps.items()}
        chosen = random.uniform(len(slots), slots.device) < self.ratio
        wanted = self._goals(storage, slots, achieved, random)
        steps = self._relabelled(steps, chosen, wanted, mask, goal, achieved)
        batch = self.view.reduce(steps, mask)
        if len(windows[0]) > 1 and ("mask",) in batch:
            first = storage.ring.first.view(-1)[flat.clamp(min=0)].view_as(mask) & mask
            batch[("is_first",)] = first
        return batch

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

    def _relabelled(
        self, steps: Leaves, chosen: torch.Tensor, wanted: torch.Tensor, mask: torch.Tensor, goal: Path, achieved: Path
    ) -> Leaves:
        length = mask.shape[1]
        goals = wanted.unsqueeze(1).expand(-1, length, *wanted.shape[1:])
        flat = {path: leaf.flatten(0, 1) for path, leaf in steps.items()}
        flat_goals = goals.flatten(0, 1)
        for path in (goal, ("next_" + goal[0], *goal[1:])):
            where = _wide(chosen.repeat_interleave(length), flat[path])
            flat[path] = torch.where(where, flat_goals.to(flat[path].dtype), flat[path])
        rows = assemble(list(flat), flat.values(), torch.Size((mask.numel(),)))
        reward, terminated = self.fn(flat[("next_" + achieved[0], *achieved[1:])], flat_goals, rows)
        changed = (chosen.unsqueeze(1) & mask).flatten()
        for path, new in ((("reward",), reward), (("terminated",), terminated)):
            old = flat[path]
            if tuple(new.shape) != tuple(old.shape):
                remedy = "Return one for each row."
                raise SchemaError(
                    explain(f"Hindsight.fn: {path[0]}", f"shape {tuple(old.shape)}", tuple(new.shape), remedy)
                )
            flat[path] = torch.where(_wide(changed, old), new.to(old.dtype), old)
        return {path: leaf.unflatten(0, mask.shape) for path, leaf in flat.items()}


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
