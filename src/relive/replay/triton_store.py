"""Rows on CUDA and ROCm devices, written, drawn and read by Triton's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from relive import lazy
from relive.fields.assembly import assemble, checked_targets
from relive.kernels import complete
from relive.kernels.priority import PriorityTree
from relive.kernels.triton.draw import draw_slots
from relive.kernels.triton.priority_tree import TritonTree
from relive.kernels.triton.stream import DeviceStream
from relive.kernels.triton.words import as_words
from relive.kernels.triton.write import GROUPS, Given, StepWriter
from relive.replay import composed
from relive.replay.ring import MOST_ROWS
from relive.replay.row_memory import RowMemory
from relive.replay.store import Leaves, Reading, Touched
from relive.replay.torch_store import TorchStore
from relive.replay.triton_reader import TritonReader, leaves_of, rings_of

if TYPE_CHECKING:
    from relive.replay.samplers import Sampler


class TritonStore(TorchStore):
    """A `ReplayStore` of few launches: one for a write of any number of steps, two for a uniform sample.

    Writes, uniform and prioritized draws, and reads of slots do not wait for the device. What Triton has no kernel for
    runs on torch ops. Under Triton's interpreter host memory is treated as a device's. Draws differ from those of other
    stores with the same seed; among Triton's they are the same on every device.
    """

    fuses = True

    def __init__(self, memory: RowMemory) -> None:
        super().__init__(memory)
        self._waits = self.counter.is_on = False
        self._rings = rings_of(memory)
        self._batches = TritonReader(memory)
        leaves, nexts = leaves_of(memory)
        others = [i for i in range(len(leaves)) if i not in memory.observed]
        self._groups = memory.observed, others
        """The leaves of observations, and the other ones."""
        obs, rest = ([leaves[i] for i in which] for which in self._groups)
        terminated, truncated = (others.index(self.schema.leaf_indices[name][0]) for name in composed.ENDS)
        self._writer = StepWriter(
            self._rings, obs, nexts, rest, memory.broken, flags=(terminated, truncated), next_step=memory.next_step
        )
        self._keeps_touched = False

    # Writing

    def write(
        self, leaves: tuple[Any, ...], nexts: tuple[Any, ...], envs: torch.Tensor | None, steps: int | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        count = 1 if steps is None else steps
        if self._rows_left < MOST_ROWS * count:
            self._rows_left = self.memory.ring.require_rows_left(count)
        fitted, fitted_nexts = self.memory.conformed(leaves, nexts, envs, steps)
        given = [as_words(leaf) for leaf in fitted]
        writers = self.num_envs if envs is None else len(envs)
        obs, others = (tuple(given[i] for i in which) for which in self._groups)
        block = Given(obs, tuple(map(as_words, fitted_nexts)), others, count, writers)
        self._writer.write(block, envs, self._room_for_touched(count, writers))
        self._forget_tables()
        self.is_empty = False
        self._rows_left -= MOST_ROWS * count
        if then is not None:
            complete(then)

    def _room_for_touched(self, steps: int, writers: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not self._keeps_touched:
            return None
        slots = torch.empty(steps * GROUPS * writers, dtype=torch.int64, device=self.device)
        changed = torch.empty_like(slots, dtype=torch.bool)
        self._touched = slots, changed
        return slots, changed.view(torch.uint8)

    def keep_touched(self) -> None:
        self._keeps_touched = True

    def touched(self) -> Touched:
        return self._touched

    # Drawing

    def random(self, seed: int | None) -> DeviceStream:
        return DeviceStream(seed, self.device)

    def draw(self, count: int, random: Any) -> torch.Tensor:
        return draw_slots(self._rings, random.numbers, count)

    def tree(self) -> PriorityTree:
        if self._tree is None:
            self._tree = TritonTree(self.memory.ring.kind.numel() + 1, self.device)
        return self._tree

    def draw_and_read(
        self, count: int, random: Any, reading: Reading, sampler: Sampler | None = None,
        out: lazy.TensorDict | None = None,
    ) -> lazy.TensorDict | None:  # fmt: skip
        if self.maybe_empty or not self._batches.reads(reading):
            return None
        if out is not None:
            return self._draw_into(count, random, reading, sampler, out)
        leaves = self._batches.empty(reading, count)
        slots, weight = (self.draw(count, random), None) if sampler is None else sampler.choose(count)
        if len(slots) != count:  # the rest of an epoch
            leaves = self._batches.empty(reading, len(slots))
        self._batches.read(slots, reading, leaves)
        if weight is not None:
            leaves[("weight",)] = weight
        return assemble(leaves, slots.shape)

    def _draw_into(
        self, count: int, random: Any, reading: Reading, sampler: Sampler | None, out: lazy.TensorDict
    ) -> lazy.TensorDict | None:
        """The same into tensors whose addresses stay, as a captured graph needs it."""
        if sampler is not None and not sampler.returns_weights:  # how many rows it chooses is known only afterwards
            return None
        forms = self._batches.forms(reading, count)
        if sampler is not None:
            forms[("weight",)] = (count,), torch.float32
        leaves = dict(zip(forms, checked_targets(out, forms, self.device), strict=True))
        slots = self.draw(count, random) if sampler is None else sampler.sample_into(count, leaves[("weight",)])
        self._batches.read(slots, reading, leaves)
        return out

    # Reading

    def transitions(self, slots: torch.Tensor) -> Leaves:
        return self._batches.fresh(slots, Reading())

    def n_steps(self, slots: torch.Tensor, n: int, gamma: float) -> Leaves:
        reading = Reading(n, gamma)
        return self._batches.fresh(slots, reading) if self._batches.reads(reading) else super().n_steps(slots, n, gamma)

    def sequences(self, slots: torch.Tensor, before: int, after: int, cross: bool) -> Leaves:
        reading = Reading(length=after, burn_in=before, cross=cross)
        if not self._batches.reads(reading):
            return super().sequences(slots, before, after, cross)
        return self._batches.fresh(slots, reading)

    # Naming

    def locate(self, ids: torch.Tensor) -> torch.Tensor:
        """An id that was never given is taken for one whose row is gone: looking would be a synchronisation."""
        return self.memory.ring.locate(ids)[0]
