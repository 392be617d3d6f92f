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
from relive.replay.ids import NO_ROW, convert_rows, flat_ids, mutable_leaves, resolve_ids, write_back
from relive.replay.read_plan import INDEX, STEP_INDEX, WEIGHT, Leaves
from relive.replay.samplers.prioritized import refuse_priorities
from relive.replay.views import View
from relive.replay.views.view import batch_plan
from relive.schema.assembly import (
    assemble,
    check_batch_size,
    check_destination,
    check_targets,
    copy_into,
    refuse_shared_memory,
    to_device,
)
from relive.schema.checks import as_float
from relive.schema.conversion import as_tensor, convert_row_ids, numpy_view
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
        self._parts = _integer_ratios(list(self.buffers), ratios)
        """The ratios as ints: remainders are exact and do not drift."""
        _require_same_fields(self.buffers)
        self._owed = [0] * len(self.buffers)
        """Rows owed to each buffer, times the sum of the ratios; negative after too many rows. Adds up to 0."""
        self._lock = threading.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the buffers, in the order of "source"."""
        return tuple(self.buffers)

    def __len__(self) -> int:
        """Return the number of transitions in all buffers."""
        return sum(map(len, self.buffers.values()))

    def sample(
        self,
        batch_size: int,
        view: View | None = None,
        *,
        device: torch.device | str | None = None,
        out: lazy.TensorDict | None = None,
    ) -> lazy.TensorDict:
        """Return a batch of `batch_size` rows; each buffer's sampler draws its share, and `view` reads it.

        The batch is shorter if a sampler without replacement returns the last rows of an epoch.
        """
        check_batch_size("sample", batch_size)
        target = check_destination(device, out)
        for buffer in self.buffers.values():
            buffer._issue_warning()
        with self._lock:
            counts, owed = self._split(batch_size)
            self._require_rows(counts)
            batch = self._draw(counts, view, out)
            self._owed = owed
        return batch if target is None else to_device(batch, target)

    def _split(self, batch_size: int) -> tuple[list[int], list[int]]:
        """Return the number of rows of each buffer, and the new remainders."""
        total = sum(self._parts)
        counts = [part * batch_size // total for part in self._parts]
        owed = [rest + part * batch_size % total for rest, part in zip(self._owed, self._parts, strict=True)]
        for _ in range(batch_size - sum(counts)):
            last = owed.index(max(owed))  # the buffer that is owed most
            counts[last] += 1
            owed[last] -= total
        return counts, owed

    def _require_rows(self, counts: list[int]) -> None:
        for (name, buffer), count in zip(self.buffers.items(), counts, strict=True):
            if count and not len(buffer):
                remedy = "Add steps to this buffer first, or give it the ratio 0."
                raise NotReadyError(explain(f"sample: {name}", "at least 1 stored transition", 0, remedy))
            if count:
                buffer.sampler.require_rows(count)

    def _draw(self, counts: list[int], view: View | None, out: lazy.TensorDict | None) -> lazy.TensorDict:
        if out is not None:
            self._check_out(out, sum(counts), view)
        parts: list[Leaves] = []
        for source, (buffer, count) in enumerate(zip(self.buffers.values(), counts, strict=True)):
            if not count:
                continue
            with buffer._lock:
                part = buffer._sample_leaves(count, view)
            index = part[INDEX]
            part[INDEX] = index * len(self.buffers) + source
            steps = part.get(STEP_INDEX)
            if steps is not None:
                part[STEP_INDEX] = torch.where(steps < 0, steps, steps * len(self.buffers) + source)
            part["source",] = torch.full_like(index, source)
            parts.append(part)
        leaves = _concatenate(parts)
        rows = len(leaves[INDEX])
        if out is None:
            return assemble(leaves, leaves[INDEX].shape)
        return copy_into(out if rows == sum(counts) else out[:rows], leaves)  # an epoch may end with fewer rows

    def _check_out(self, out: lazy.TensorDict, count: int, view: View | None) -> None:
        """Verify `out` before any row is drawn, including its fields unless a user's view computes them."""
        buffers = list(self.buffers.values())
        reader, finish = buffers[0]._get_reader(view)
        plan = batch_plan(reader.plan, finish)
        own = [memory for buffer in buffers for memory in buffer._memory_ranges()]
        if plan is None:
            refuse_shared_memory(out, own)
            return
        forms = plan.leaf_specs(buffers[0].storage.schema, count) | {("source",): ((count,), torch.int64)}
        if any(buffer.sampler.returns_weights for buffer in buffers):
            forms[WEIGHT] = (count,), torch.float32
        check_targets(out, forms, buffers[0].device, own)

    def update_priority(self, index: Any, priority: Any) -> int:
        """Give the rows `index` (of a batch) new priorities, each in its own buffer; returns how many were stale.

        Rows of buffers without priorities are ignored. Raises if no buffer has priorities.
        """
        buffers = list(self.buffers.values())
        prioritized = [buffer.sampler.takes_priorities for buffer in buffers]
        if not any(prioritized):
            remedy = "Make at least one buffer with sampler=rl.Prioritized()."
            samplers = ", ".join(f"{name}: {buffer.sampler}" for name, buffer in self.buffers.items())
            raise SchemaError(explain("update_priority", "a buffer with priorities", samplers, remedy))
        ids = convert_row_ids(index, buffers[0].device)
        values = as_tensor("priority", priority, ids.device).to(ids.device)
        if values.shape != ids.shape:
            remedy = "Pass a priority for each index."
            raise SchemaError(explain("priority", f"shape {tuple(ids.shape)}", tuple(values.shape), remedy))
        # Checked before any buffer is changed, but only on the CPU: on other devices it would synchronise.
        if numpy_view(values) is not None:
            refuse_priorities(~(torch.isfinite(values) & (values >= 0)), values)
        rows, source = ids // len(buffers), ids % len(buffers)
        parts = [(buffer, source == i) for i, buffer in enumerate(buffers) if prioritized[i]]
        for buffer, is_own in parts:
            buffer.storage.locate(rows[is_own])  # raises for ids that were never issued
        return sum(buffer.update_priority(rows[is_own], values[is_own]) for buffer, is_own in parts)

    def write(self, index: Any, **fields: Any) -> int:
        """Write new values of `Mutable` fields into the rows `index` (of a batch), each in its own buffer.

        See `ReplayBuffer.write`. Ids that were never issued and values that do not fit are refused before any buffer is
        changed.
        """
        buffers = list(self.buffers.values())
        flat, lead = flat_ids(index, buffers[0].device)
        is_id = flat >= (0 if len(lead) == 1 else NO_ROW)
        if numpy_view(is_id) is not None and not is_id.all():
            bad = int(flat[~is_id][0])
            raise IndexError(explain("index", "ids of transitions", bad, "Pass ids from batch['index']."))
        stale: Any = 0
        for changes in (False, True):
            for i, buffer in enumerate(buffers):
                own = torch.where((flat % len(buffers) == i) & (flat >= 0), flat // len(buffers), NO_ROW)
                if numpy_view(own) is None or bool((own >= 0).any()):
                    stale += _write_part(buffer, own, lead, fields, changes=changes)
        return stale

    def __repr__(self) -> str:
        shares = zip(self.buffers, self._parts, strict=True)
        parts = (f"{name}: {part / sum(self._parts):.3g}" for name, part in shares)
        return f"Mixture({', '.join(parts)}; {len(self)} transitions)"


def _integer_ratios(names: list[str], ratios: Mapping[str, float] | Sequence[float]) -> list[int]:
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


def _write_part(
    buffer: ReplayBuffer, ids: torch.Tensor, lead: tuple[int, ...], fields: Mapping[str, Any], *, changes: bool
) -> Any:
    """Verify new values for a buffer, or with `changes` write them; returns how many rows were stale."""
    store = buffer.storage
    with buffer._lock:
        leaves = mutable_leaves(store.schema, fields)
        if changes:
            return write_back(store, ids, lead, leaves, padded=True)
        resolve_ids(store, ids, padded=True)
        convert_rows(store, lead, leaves)
        return 0


def _concatenate(parts: list[Leaves]) -> Leaves:
    if any(WEIGHT in part for part in parts):
        for part in parts:
            part.setdefault(WEIGHT, torch.ones(len(part[INDEX]), device=part[INDEX].device))
    return {path: torch.cat([part[path] for part in parts]) for path in parts[0]}
