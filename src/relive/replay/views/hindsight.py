"""Hindsight: relabels steps with goals that the same episode reached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from relive import lazy
from relive.errors import SchemaError, explain
from relive.kernels.torch_ops import add_axes
from relive.replay.read_plan import MASK, Leaves, ReadPlan, make_next_obs_path
from relive.replay.torch_reader import reduce_steps
from relive.replay.views.view import DEFAULT_VIEW, ReadContext, View
from relive.schema.assembly import assemble_batch
from relive.schema.checks import check_fraction
from relive.schema.conversion import convert, path_name
from relive.schema.fields import Path, Schema
from relive.schema.suggestions import suggests_init_keywords

Relabel = Callable[[torch.Tensor, torch.Tensor, "lazy.TensorDict"], tuple[torch.Tensor, torch.Tensor]]
"""fn(achieved_next [M, …], goal [M, …], rows [M]) → (reward [M], terminated [M]).

It receives every step, including padding and steps that keep their goal; its results for these are ignored.
"""


@suggests_init_keywords
@dataclass(frozen=True)
class Hindsight:
    """Replaces the goal of a share `ratio` of the drawn rows by one that the same episode reached.

    Reward and terminated are recomputed from the next state of each step, for all steps that the inner view reads.
    (Andrychowicz et al., Hindsight Experience Replay, 2017.)

    Args:
        goal: the leaf of the observation that holds the goal: a name inside `obs`, or a whole path.
        achieved: the leaf of the observation that holds the achieved goal, named like `goal`.
        fn: fn(achieved_next [M, …], goal [M, …], rows [M]) returns (reward [M], terminated [M]).
        ratio: share of the drawn rows whose goal is replaced, in [0, 1].
        strategy: source of the new goal: a step from the drawn one on ("future"), the last step ("final"), or any step
            of the episode ("episode"); always the goal achieved *after* that step.
        view: reads the steps around each row: `Transition`, `NStep`, `Sequence` or `Window`.
    """

    goal: str | Path
    achieved: str | Path
    fn: Relabel
    ratio: float = 0.8
    strategy: Literal["future", "final", "episode"] = "future"
    view: View = DEFAULT_VIEW

    def __post_init__(self) -> None:
        check_fraction("Hindsight.ratio", self.ratio)
        if self.strategy not in ("future", "final", "episode"):
            remedy = "Pass one of them."
            raise SchemaError(explain("Hindsight.strategy", '"future", "final" or "episode"', self.strategy, remedy))

    def plan(self, schema: Schema) -> ReadPlan:
        goal, achieved = (
            schema.fields[schema.paths.index(_find_leaf(schema, name))] for name in (self.goal, self.achieved)
        )
        if goal != achieved:
            remedy = "Declare goal and achieved goal alike."
            raise SchemaError(explain("Hindsight", f"an achieved goal like {goal}", achieved, remedy))
        inner = self.view.plan(schema)
        if inner.cross_episodes:
            remedy = "Pass cross_episodes=False: goals belong to one episode."
            raise SchemaError(explain("Sequence", "one episode", "cross_episodes=True", remedy))
        return inner.with_all_steps(schema)

    def finish(self, batch: Leaves, context: ReadContext) -> Leaves:
        """Relabel the steps of a share of the rows, and compute the inner view's batch from all steps."""
        plan = context.plan
        assert plan.reduced is not None
        changed = context.random.uniform(len(context.slots), context.slots.device) < self.ratio
        goals, steps = self._draw_goals(context), {read.path: batch[read.path] for read in plan.reads}
        if plan.is_transition:
            self._relabel_steps(context.schema, steps, changed, goals)
            return reduce_steps(batch | steps, plan.reduced)
        mask = batch[MASK]
        flat = {path: leaf.flatten(0, 1) for path, leaf in steps.items()}
        changed, goals = (changed.unsqueeze(1) & mask).flatten(), goals.repeat_interleave(mask.shape[1], 0)
        old_leaves = dict(flat)
        self._relabel_steps(context.schema, flat, changed, goals)
        batch |= {path: leaf.unflatten(0, mask.shape) for path, leaf in flat.items() if leaf is not old_leaves[path]}
        return reduce_steps(batch, plan.reduced)

    def _draw_goals(self, context: ReadContext) -> torch.Tensor:
        """Draw one goal [B, …] per row among the goals that its episode achieved."""
        following = context.count_following()
        if self.strategy == "future":
            offset = context.random.integers_below(following + 1, len(following))
        elif self.strategy == "final":
            offset = following
        else:
            preceding = context.count_preceding()
            offset = context.random.integers_below(following + preceding + 1, len(following)) - preceding
        return context.column(_find_leaf(context.schema, self.achieved), context.shift(offset + 1))

    def _relabel_steps(self, schema: Schema, steps: Leaves, changed: torch.Tensor, goals: torch.Tensor) -> None:
        """Replace the goals, rewards and terminated flags of the steps [M, …] where `changed` [M] is True."""
        goal, achieved = _find_leaf(schema, self.goal), _find_leaf(schema, self.achieved)
        mask = add_axes(changed, goals)
        for path in (goal, make_next_obs_path(goal)):
            steps[path] = torch.where(mask, goals, steps[path])
        rows = assemble_batch(steps, torch.Size((len(changed),)))
        results = self.fn(steps[make_next_obs_path(achieved)], steps[goal], rows)
        if not isinstance(results, tuple) or len(results) != 2:
            remedy = "Return a tuple of both."
            raise SchemaError(explain("Hindsight.fn", "(reward, terminated)", type(results).__name__, remedy))
        for name, result in zip(("reward", "terminated"), results, strict=True):
            leaves = schema.flatten(name, result, f"Hindsight.fn: {name}")
            for i, leaf in zip(schema.leaf_indices[name], leaves, strict=True):
                path, field = schema.paths[i], schema.fields[i]
                # The user's function may return an unchanged leaf of `rows`, which needs no conversion.
                if leaf is steps[path]:
                    continue
                where = f"Hindsight.fn: {path_name(path)}"
                converted = convert(where, field, leaf, (len(changed),), changed.device, unit="rows")
                steps[path] = torch.where(add_axes(changed, converted), converted, steps[path])


def _find_leaf(schema: Schema, name: str | Path) -> Path:
    path = tuple(name) if not isinstance(name, str) else (name,) if name == "obs" else ("obs", name)
    paths = [schema.paths[i] for i in schema.leaf_indices["obs"]]
    if path not in paths:
        names = ", ".join(".".join(p) for p in paths)
        raise SchemaError(
            explain("Hindsight", f"a leaf of the observation ({names})", ".".join(path), "Name one of them.")
        )
    return path
