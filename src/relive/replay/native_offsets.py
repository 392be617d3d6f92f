"""Windows of single fields in host memory: one call of the C++ core reads a whole batch."""

from __future__ import annotations

from typing import Any

import torch

from relive import kernels
from relive.fields.schema import Path, Stacked
from relive.replay.offset_plan import OffsetPlan
from relive.replay.row_memory import RowMemory
from relive.replay.store import Leaves

_SUMMED = (torch.float32, torch.float64)


class OffsetReader:
    """Reads batches of one plan; it keeps no reference to the plan, so that both go together."""

    def __init__(self, memory: RowMemory, plan: OffsetPlan) -> None:
        schema, ring = memory.schema, memory.ring
        masks = [group.mask for group in plan.groups]
        discount = [("discount",)] if plan.n else []
        self._paths: list[Path] = [*schema.paths, *memory.next_paths, ("index",), *discount, *masks]
        stacks = [(f.k, f.axis, f.pad == "repeat") if isinstance(f, Stacked) else None for f in schema.fields]
        self._core: Any = kernels.native().OffsetReader(
            list(memory.leaves), stacks, list(memory.observed), {**ring.state, "seals": memory.seals},
            *(schema.leaf_indices[name][0] for name in ("reward", "terminated", "truncated")),
            [(int(group.counted), list(group.offsets)) for group in plan.groups],
            plan.leaf_groups, plan.next_groups, plan.zeros, min(plan.n, ring.slots), plan.gamma,
        )  # fmt: skip

    def read(self, slots: torch.Tensor) -> Leaves:
        """The batch of the rows at these slots."""
        # Without strict=: a keyword costs as much as the pairs.
        return dict(zip(self._paths, self._core.read(slots)))  # noqa: B905


def sums_natively(memory: RowMemory, plan: OffsetPlan) -> bool:
    """Whether the core sums the rewards of this plan: those of one agent, in single or double precision."""
    agents = memory.schema.leaf_indices["reward"]
    left = [i for i in agents if plan.leaf_groups[i] < 0]
    return not (plan.n and left) or (len(agents) == 1 and memory.leaves[agents[0]].dtype in _SUMMED)
