"""Batches from several buffers in fixed ratios, such as online data and demonstrations."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from fractions import Fraction
from numbers import Real
from typing import Any

import torch

from relive import lazy
from relive.errors import NotReadyError, SchemaError, explain
from relive.replay.buffer import ReplayBuffer
from relive.replay.ids import (
    PADDING_ID,
    convert_values,
    find_slots,
    flatten_ids,
    flatten_mutable_fields,
    write_mutable_leaves,
)
from relive.replay.read_plan import INDEX, STEP_INDEX, WEIGHT, LeafSpecs, Leaves
from relive.replay.samplers.prioritized import refuse_invalid_priorities
from relive.replay.views import View
from relive.schema.assembly import (
    assemble_batch,
    check_batch_size,
    check_destination,
    copy_leaves_into,
    to_device,
)
from relive.schema.checks import as_float
from relive.schema.conversion import as_tensor, convert_row_ids, view_as_numpy
from relive.schema.fields import caller_shape


class Mixture:
    """Draws each batch from several replay buffers, in fixed ratios.

    A batch contains the rounded share of each buffer; later batches compensate the rounding, so that no buffer falls a
    whole row behind. Rows are in the order of the buffers; "source" is the number of each row's buffer. "index" is the
    row's id · number of buffers + source, which `update_priority` and `write` map back to the buffers. If only some
    buffers have weights, the other rows have weight 1; the weights of a buffer are relative to its own largest.

    Args:
        buffers: replay buffers by name, with the same fields.
        ratios: share of each buffer, by name or in order; they need not add up to 1.

    >>> online, demos = (ReplayBuffer(100, obs=1, action=(), seed=0) for _ in range(2))
    >>> for buffer, value in ((online, 0.0), (demos, 1.0)):
    ...     buffer.add([value], 0.0, 0.0, terminated=True, truncated=False, next_obs=[value + 2])
    >>> mixture = Mixture({"online": online, "demos": demos}, {"online": 3, "demos": 1})
    >>> mixture.sample(8)["source"]
    tensor([0, 0, 0, 0, 0, 0, 1, 1])
    """

    def __init__(self, buffers: Mapping[str, ReplayBuffer], ratios: Mapping[str, float] | Sequence[float]) -> None:
        self.buffers = dict(buffers)
        self._ratios = _make_integer_ratios(list(self.buffers), ratios)
        """The ratios as ints, so that remainders are exact and do not drift."""
        _require_same_fields(self.buffers)
        self._debts = [0] * len(self.buffers)
        """Rows that each buffer is behind its share, times the sum of the ratios; negative if it is ahead. Sum 0."""
        self._lock = threading.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the buffers, in the order of "source"."""
        return tuple(self.buffers)

    def __len__(self) -> int:
        return sum(map(len, self.buffers.values()))

    def sample(
        self,
        batch_size: int,
        view: View | None = None,
        *,
        device: torch.device | str | None = None,
        out: lazy.TensorDict | None = None,
    ) -> lazy.TensorDict:
        """Return a batch of `batch_size` rows: each buffer's sampler chooses its share of rows, and `view` reads them.

        The batch is shorter if a sampler without replacement returns the last rows of an epoch.
        """
        check_batch_size("sample", batch_size)
        target = check_destination(device, out)
        for buffer in self.buffers.values():
            buffer._issue_pending_warning()
        with self._lock:
            counts, debts = self._split_batch(batch_size)
            self._require_rows(counts)
            batch = self._sample_buffers(counts, view, out)
            self._debts = debts
        return batch if target is None else to_device(batch, target)

    def _split_batch(self, batch_size: int) -> tuple[list[int], list[int]]:
        """Return the number of rows to draw from each buffer, and the rounding errors that later batches compensate."""
        total = sum(self._ratios)
        counts = [ratio * batch_size // total for ratio in self._ratios]
        debts = [debt + ratio * batch_size % total for debt, ratio in zip(self._debts, self._ratios, strict=True)]
        for _ in range(batch_size - sum(counts)):
            largest = debts.index(max(debts))
            counts[largest] += 1
            debts[largest] -= total
        return counts, debts

    def _require_rows(self, counts: list[int]) -> None:
        for (name, buffer), count in zip(self.buffers.items(), counts, strict=True):
            if count and not len(buffer):
                remedy = "Add steps to this buffer first, or give it the ratio 0."
                raise NotReadyError(explain(f"sample: {name}", "at least 1 stored transition", 0, remedy))
            if count:
                buffer.sampler.require_rows(count)

    def _sample_buffers(self, counts: list[int], view: View | None, out: lazy.TensorDict | None) -> lazy.TensorDict:
        if out is not None:
            self._check_out(out, sum(counts), view)
        batches: list[Leaves] = []
        for source, (buffer, count) in enumerate(zip(self.buffers.values(), counts, strict=True)):
            if not count:
                continue
            with buffer._lock:
                batch = buffer._sample_leaves(count, buffer._bind_view(view))
            ids, step_ids = batch[INDEX], batch.get(STEP_INDEX)
            batch[INDEX] = ids * len(self.buffers) + source
            if step_ids is not None:
                batch[STEP_INDEX] = torch.where(step_ids < 0, step_ids, step_ids * len(self.buffers) + source)
            batch["source",] = torch.full_like(ids, source)
            batches.append(batch)
        leaves = _concatenate(batches)
        if out is None:
            return assemble_batch(leaves, leaves[INDEX].shape)
        # At the end of an epoch the samplers may choose fewer rows, which fill only the first rows of `out`.
        num_rows = len(leaves[INDEX])
        return copy_leaves_into(out if num_rows == sum(counts) else out[:num_rows], leaves)

    def _check_out(self, out: lazy.TensorDict, count: int, view: View | None) -> None:
        """Verify `out` before any row is drawn; its fields cannot be verified if a user's view computes them."""
        buffers = list(self.buffers.values())
        own_memory = [memory for buffer in buffers for memory in buffer._memory_ranges()]
        added: LeafSpecs = {("source",): ((count,), torch.int64)}
        if any(buffer.sampler.returns_weights for buffer in buffers):
            added[WEIGHT] = (count,), torch.float32
        buffers[0]._bind_view(view).check_out(out, count, added, own_memory)

    def update_priority(self, index: Any, priority: Any) -> int:
        """Set the priorities of the rows `index` (of a batch), each in its own buffer; returns how many were stale.

        Rows of buffers without priorities are ignored. Raises if no buffer has priorities.
        """
        buffers = list(self.buffers.values())
        is_prioritized = [buffer.sampler.takes_priorities for buffer in buffers]
        if not any(is_prioritized):
            remedy = "Make at least one buffer with sampler=rl.Prioritized()."
            samplers = ", ".join(f"{name}: {buffer.sampler}" for name, buffer in self.buffers.items())
            raise SchemaError(explain("update_priority", "a buffer with priorities", samplers, remedy))
        ids = convert_row_ids(index, buffers[0].device)
        values = as_tensor("priority", priority, ids.device).to(ids.device)
        if values.shape != ids.shape:
            remedy = "Pass a priority for each index."
            raise SchemaError(explain("priority", f"shape {tuple(ids.shape)}", tuple(values.shape), remedy))
        # Priorities are checked before any buffer is changed, but not on devices, where the check would synchronise.
        if view_as_numpy(values) is not None:
            refuse_invalid_priorities(~(torch.isfinite(values) & (values >= 0)), values)
        rows, source = ids // len(buffers), ids % len(buffers)
        updates = [(buffer, source == i) for i, buffer in enumerate(buffers) if is_prioritized[i]]
        # `locate` raises for ids that were never issued, so these raise before any buffer is changed.
        for buffer, is_own in updates:
            buffer.storage.locate(rows[is_own])
        return sum(buffer.update_priority(rows[is_own], values[is_own]) for buffer, is_own in updates)

    def write(self, index: Any, **fields: Any) -> int:
        """Write new values of `Mutable` fields into the rows `index` (of a batch), each in its own buffer.

        See `ReplayBuffer.write`. Ids that were never issued and values that do not fit are refused before any buffer is
        changed.
        """
        buffers = list(self.buffers.values())
        ids, ids_shape = flatten_ids(index, buffers[0].device)
        is_id = ids >= (0 if len(ids_shape) == 1 else PADDING_ID)
        if view_as_numpy(is_id) is not None and not is_id.all():
            invalid_id = int(ids[~is_id][0])
            raise IndexError(explain("index", "ids of transitions", invalid_id, "Pass ids from batch['index']."))
        parts = []
        for i, buffer in enumerate(buffers):
            own_ids = torch.where((ids % len(buffers) == i) & (ids >= 0), ids // len(buffers), PADDING_ID)
            if view_as_numpy(own_ids) is None or bool((own_ids >= 0).any()):
                parts.append((buffer, own_ids))
        for buffer, own_ids in parts:
            with buffer._lock:
                leaves = flatten_mutable_fields(buffer.storage.schema, fields)
                find_slots(buffer.storage, own_ids, padded=True)
                convert_values(buffer.storage, ids_shape, leaves)
        num_stale: Any = 0
        for buffer, own_ids in parts:
            with buffer._lock:
                leaves = flatten_mutable_fields(buffer.storage.schema, fields)
                num_stale += write_mutable_leaves(buffer.storage, own_ids, ids_shape, leaves, padded=True)
        return num_stale

    def __repr__(self) -> str:
        ratios = zip(self.buffers, self._ratios, strict=True)
        shares = (f"{name}: {ratio / sum(self._ratios):.3g}" for name, ratio in ratios)
        return f"Mixture({', '.join(shares)}; {len(self)} transitions)"


def _make_integer_ratios(names: list[str], ratios: Mapping[str, float] | Sequence[float]) -> list[int]:
    shares = [ratios.get(name) for name in names] if isinstance(ratios, Mapping) else list(ratios)
    has_all_names = not isinstance(ratios, Mapping) or set(ratios) == set(names)
    is_valid = [isinstance(x, Real) and not isinstance(x, bool) and 0 <= as_float(x) < float("inf") for x in shares]
    if not names or len(shares) != len(names) or not has_all_names or not all(is_valid) or not any(shares):
        remedy = "Pass one ratio for each buffer, not all of them 0."
        raise SchemaError(
            explain("ratios", f"numbers of at least 0 for {', '.join(names) or 'buffers'}", ratios, remedy)
        )
    fractions = [Fraction(ratio) for ratio in shares]  # pyright: ignore[reportArgumentType, reportCallIssue]
    return [int(ratio * math.lcm(*(ratio.denominator for ratio in fractions))) for ratio in fractions]


def _require_same_fields(buffers: Mapping[str, ReplayBuffer]) -> None:
    """Raise if the buffers are not distinct ReplayBuffers with the same fields on one device."""
    first: tuple[str, Any] | None = None
    for name, buffer in buffers.items():
        if not isinstance(buffer, ReplayBuffer):
            remedy = "Read other data into a ReplayBuffer, for example with relive.datasets."
            raise SchemaError(explain(f"Mixture: {name}", "a ReplayBuffer", type(buffer).__name__, remedy))
        schema = buffer.storage.schema
        fields = {
            path: (caller_shape(leaf), leaf.dtype) for path, leaf in zip(schema.paths, schema.fields, strict=True)
        }
        signature = (str(buffer.device), fields)
        first = first or (name, signature)
        if signature != first[1]:
            different_paths = [
                ".".join(path) for path in {**fields, **first[1][1]} if fields.get(path) != first[1][1].get(path)
            ]
            got = f"other fields ({', '.join(different_paths)})" if different_paths else f"device {buffer.device}"
            expected = f"the fields and the device of {first[0]}"
            raise SchemaError(explain(f"Mixture: {name}", expected, got, "Declare both buffers alike."))
    if len({id(buffer) for buffer in buffers.values()}) < len(buffers):
        names = ", ".join(buffers)
        raise SchemaError(
            explain("Mixture", "distinct buffers", f"one buffer twice among {names}", "Give it a larger ratio.")
        )


def _concatenate(batches: list[Leaves]) -> Leaves:
    if any(WEIGHT in batch for batch in batches):
        for batch in batches:
            batch.setdefault(WEIGHT, torch.ones(len(batch[INDEX]), device=batch[INDEX].device))
    return {path: torch.cat([batch[path] for batch in batches]) for path in batches[0]}
