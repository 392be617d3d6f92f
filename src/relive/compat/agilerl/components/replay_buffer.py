"""AgileRL's replay buffers on relive's core: rows are TensorDicts with any field names."""

from __future__ import annotations

import operator
from collections import deque
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

import relive as rl
from relive.compat.agilerl.components.segment_tree import MinSegmentTree, SumSegmentTree
from relive.compat.agilerl.rows import find_original_class, to_batch, to_columns
from relive.compat.pickling import PicklableBuffer, restore_core
from relive.compat.seeding import choose_seed
from relive.compat.views import WriteThroughTensorDict, map_tree
from relive.errors import SchemaError, explain
from relive.locking import permit_forked_copy
from relive.replay.samplers import Sampler
from relive.schema.checks import check_positive_int
from relive.schema.fields import Field

_MIN_ROWS_WITH_REPLACEMENT = 16_384
"""Number of stored rows above which batches are drawn with replacement; below, all rows of a batch differ."""


class ReplayBuffer(PicklableBuffer, find_original_class("components.replay_buffer", "ReplayBuffer")):
    """AgileRL's `ReplayBuffer`: the newest `max_size` rows of TensorDicts, shaped by the first `add`.

    Rows are stored in their own dtypes; `dtype` is an attribute without effect. `core` is the relive buffer underneath,
    with the rows as its field "action"; None before the first `add`. `seed` makes draws repeatable, and so does a seed
    of torch. A pickled buffer continues with the same draws.

    Differences from AgileRL: added rows are copied and not reshaped in place, `clear` removes every row, and "idxs" are
    permanent row ids: the id of an overwritten row never names another row. Until a row is overwritten the ids are the
    slots 0, 1, 2, …
    """

    def __init__(
        self,
        max_size: int,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        seed: int | None = None,
    ) -> None:
        # Size 0 is accepted, because a subclass that stores its rows itself passes it.
        self.max_size = 0 if max_size == 0 else check_positive_int("max_size", max_size)
        self.device = device
        self.dtype = dtype
        self.counter = 0
        """Number of rows ever added; `clear` does not change it."""
        self.core: rl.ReplayBuffer | None = None
        self._fields: dict[str, Any] = {}
        self._random = np.random.default_rng(choose_seed(seed))
        self._rows: TensorDict | None = None
        """Cache of `storage`."""
        self._num_written = 0
        """Number of rows added to the current core."""
        self._first_id = 0
        """The id of the current core's first row: the offset between the core's ids and "idxs"."""
        self._assigned_size = 0
        """Value of `size` without a core."""

    def _make_sampler(self) -> Sampler:
        return rl.Uniform()

    def _make_core(self, fields: dict[str, Any], seed: int) -> rl.ReplayBuffer:
        """Make a core that stores rows with these fields as its field "action"; its other fields are unused."""
        return rl.ReplayBuffer(
            self.max_size, (), fields, sampler=self._make_sampler(), device=self.device, next_obs="stored", seed=seed,
        )  # fmt: skip

    def _draw_seed(self) -> int:
        return int(self._random.integers(2**62))

    @property
    def initialized(self) -> bool:
        """Whether the first `add` has declared the fields of this buffer's rows."""
        return self.core is not None

    @property
    def storage(self) -> TensorDict | None:
        """The writable memory of the rows `[max_size]`; None before the first `add`."""
        if self._rows is None and self.core is not None:
            rows: Any = self.core.columns["action"].squeeze(1)
            self._rows = WriteThroughTensorDict(dict(rows.items()), rows.batch_size, device=self.core.device).lock_()
        return self._rows

    @property
    def size(self) -> int:
        """Number of stored rows. Setting it to n makes the first n rows of `storage` the stored ones.

        Before the first `add` it is a plain number, for a subclass with rows of its own.
        """
        return self._assigned_size if self.core is None else len(self.core)

    @size.setter
    def size(self, size: int) -> None:
        if self.storage is None:
            self._assigned_size = size
            return
        if not 0 <= size <= self.max_size:
            raise SchemaError(explain("size", f"0 to {self.max_size}", size, "Add rows instead."))
        rows, counter = self.storage.clone(), self.counter
        ReplayBuffer.clear(self)
        self.core = self._make_core(self._fields, self._draw_seed())
        self._storage = rows
        if size:
            ReplayBuffer.add(self, rows[:size])
        self.counter = counter

    _size = size

    @property
    def _storage(self) -> TensorDict | None:
        return self.storage

    @_storage.setter
    def _storage(self, rows: TensorDict) -> None:
        if self.storage is not None:
            self.storage.update_(rows)
        elif not rows.is_empty():
            remedy = "Add the rows instead."
            raise SchemaError(explain("_storage", "no rows before the first add", rows.batch_size, remedy))

    @property
    def _cursor(self) -> int:
        """Slot of the row that is added next."""
        return self._num_written % self.max_size

    @property
    def is_full(self) -> bool:
        """Whether the next row overwrites the oldest."""
        return self.size == self.max_size

    def __len__(self) -> int:
        return self.size

    def add(self, data: TensorDict) -> TensorDict | None:
        """Store the rows of `data` `[B]`; leaves `[B]` become `[B, 1]`."""
        if data.ndim != 1:
            remedy = "Give the transitions one batch axis, as in batch_size=[num_envs]."
            raise SchemaError(explain("add", "a TensorDict of batch size [B]", list(data.batch_size), remedy))
        self._store_rows(to_columns(data, torch.device(self.device)), len(data))

    def _store_rows(self, rows: dict[str, Any], num_rows: int) -> None:
        core, fields = self.core, self._fields
        if core is None:
            fields = map_tree(lambda leaf: Field(tuple(leaf.shape[1:]), leaf.dtype), rows)
            core = self._make_core(fields, self._draw_seed())
        placeholder_rows = torch.zeros(2, num_rows, device=core.device)
        all_false = torch.zeros(num_rows, dtype=torch.bool, device=core.device)
        unused = {
            "obs": placeholder_rows[0],
            "reward": placeholder_rows[0],
            "next_obs": placeholder_rows[1],
            "terminated": all_false,
        }
        core.extend({**unused, "truncated": all_false, "action": rows})
        self.core, self._fields = core, fields
        self._num_written += num_rows
        self.counter += num_rows

    def sample(self, batch_size: int, return_idx: bool = False, *, beta: float = 0.4) -> TensorDict:
        """Draw `batch_size` rows, or all if fewer are stored; `return_idx` adds ids "idxs" `[B]`. Ignores `beta`."""
        core = self._require_core()
        size, count = len(core), max(min(operator.index(batch_size), len(core)), 0)
        if size < _MIN_ROWS_WITH_REPLACEMENT:
            slots = torch.from_numpy(self._random.choice(size, count, replace=False))
        else:
            slots = torch.randint(
                size, (count,), generator=torch.Generator().manual_seed(self._draw_seed()), device="cpu"
            )
        batch = core.read((slots + (self._num_written - size)).to(core.device))
        return to_batch(batch["action"], **({"idxs": self._to_global_ids(batch["index"])} if return_idx else {}))

    def _to_global_ids(self, index: torch.Tensor) -> torch.Tensor:
        """Convert the core's ids, which start at the last `clear`, to ids that start at the first `add`."""
        return index + self._first_id if self._first_id else index

    def _require_core(self) -> rl.ReplayBuffer:
        if self.core is None:
            raise AssertionError(explain("sample", "stored rows", "an empty buffer", "Call add first."))
        return self.core

    def clear(self) -> None:
        """Remove every row; the next `add` may have other fields."""
        self._first_id += self._num_written
        self._num_written = self._assigned_size = 0
        self.core = self._rows = None

    def use_forked_copy(self, seed: int) -> None:
        """Draw from this child process's copy of the rows, with a new random generator."""
        self._random = np.random.default_rng(seed)
        if self.core is not None:
            permit_forked_copy(self.core)
            self.core._random.restore(self.core.storage.make_random(self._draw_seed()).snapshot())

    _derived_attributes = ("_rows",)

    def _set_derived_attributes(self) -> None:
        self._rows = None
        if self.core is not None:
            self.core = restore_core(self._make_core(self._fields, seed=0), self.core)


class MultiStepReplayBuffer(ReplayBuffer, find_original_class("components.replay_buffer", "MultiStepReplayBuffer")):
    """AgileRL's `MultiStepReplayBuffer`: rows of n steps, with the reward Σ γ^i r_i up to the first end.

    "next_obs" and "done" of a row belong to the last summed step. `add` takes one step of every environment. When
    the window of n steps is full, it stores their sum as a row and returns the oldest step; before that it returns
    None.

    Differences from AgileRL: an episode that ends with the first step of the window ends the sum, an end in one
    environment does not end other environments, next observations may be nested, integer rewards become floats, and
    `clear` empties the window.
    """

    def __init__(
        self,
        max_size: int,
        n_step: int = 3,
        gamma: float = 0.99,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        seed: int | None = None,
    ) -> None:
        ReplayBuffer.__init__(self, max_size, device, dtype, seed=seed)
        self.n_step = check_positive_int("n_step", n_step)
        self.gamma = gamma
        self.n_step_buffer: deque[TensorDict] = deque(maxlen=n_step)
        self.reward_key = "reward"
        self.done_key: str | None = None
        self.ns_key = "next_obs"

    def add(self, data: TensorDict) -> TensorDict | None:
        """Add one step of every environment; return the oldest step of the window if it is full, else None."""
        done_key = self.done_key or self._find_done_key(data)
        target_device = torch.device(self.device)
        data = data.clone() if data.device in (None, target_device) else data.to(target_device).clone()
        self._check_same_fields(data)
        window = [*self.n_step_buffer, data][-self.n_step :]
        is_full = len(window) == self.n_step
        if is_full:
            self._store_rows(self._sum_steps(window, done_key), len(data))
        self.n_step_buffer.append(data)
        self.done_key = done_key
        return window[0] if is_full else None

    def _check_same_fields(self, data: TensorDict) -> None:
        """Raise unless this step has the fields and the number of environments of the previous step."""
        previous = self.n_step_buffer[-1] if self.n_step_buffer else data
        expected, got = (
            (list(step.batch_size), map_tree(lambda leaf: (tuple(leaf.shape), leaf.dtype), step))
            for step in (previous, data)
        )
        if got != expected:
            remedy = "Add the same fields for all environments in every call."
            raise SchemaError(explain("add", f"batch size and fields {expected} as before", got, remedy))

    def _find_done_key(self, data: TensorDict) -> str:
        names = ("done", "termination", "terminated")
        done = next((name for name in names if name in data.keys()), None)
        missing = [name for name in (self.reward_key, self.ns_key) if name not in data.keys()]
        if done is None or missing:
            expected = f"{self.reward_key!r}, {self.ns_key!r} and one of {names}"
            got = f"{sorted(map(str, data.keys()))}"
            raise AssertionError(explain("add", expected, got, "Name the fields so, or set reward_key and ns_key."))
        return done

    def _get_n_step_info(self) -> TensorDict:
        """Sum the steps in the window to one row per environment."""
        steps = list(self.n_step_buffer)
        rows: Any = self._sum_steps(steps, self.done_key or self._find_done_key(steps[0]))
        return TensorDict(rows, batch_size=steps[0].batch_size)

    def _sum_steps(self, steps: list[TensorDict], done_key: str) -> dict[str, Any]:
        """Return the oldest step with the summed reward, and the done and next observation of the last summed step."""
        rewards = (step[self.reward_key] for step in reversed(steps))
        total, *earlier_rewards = (reward if reward.is_floating_point() else reward.float() for reward in rewards)
        last_fields = {key: steps[-1][key] for key in (done_key, self.ns_key)}
        for step, reward in zip(reversed(steps[:-1]), earlier_rewards, strict=True):
            ended = step[done_key].bool().reshape(len(step), -1).any(1)
            if ended.any():
                total = total.masked_fill(_broadcast_flags(ended, total), 0)
                last_fields = {key: _select_rows(ended, step[key], later) for key, later in last_fields.items()}
            total = reward + self.gamma * total
        return to_columns({**dict(steps[0].items()), self.reward_key: total, **last_fields}, total.device)

    def sample_from_indices(self, idxs: torch.Tensor) -> TensorDict:
        """Read the rows with these ids. A second buffer that got every result of `add` has the same ids."""
        flat = idxs if idxs.ndim == 1 else idxs.reshape(-1)
        rows = to_batch(self._require_core().read(flat - self._first_id if self._first_id else flat)["action"])
        return rows if idxs.ndim == 1 else rows.view(*idxs.shape)

    def clear(self) -> None:
        """Remove every row, and the steps of the window."""
        super().clear()
        self.n_step_buffer.clear()
        self.done_key = None


class PrioritizedReplayBuffer(ReplayBuffer, find_original_class("components.replay_buffer", "PrioritizedReplayBuffer")):
    """AgileRL's `PrioritizedReplayBuffer`: row i is drawn with probability p_i^alpha / Σ p^alpha.

    `alpha` can be set until the first row is added. Writing to `sum_tree` or `min_tree` writes priorities.

    Differences from AgileRL: `clear` resets priorities, NaN is refused as a priority, and a priority for an overwritten
    row is skipped.
    """

    def __init__(
        self,
        max_size: int,
        alpha: float = 0.6,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        seed: int | None = None,
    ) -> None:
        ReplayBuffer.__init__(self, max_size, device, dtype, seed=seed)
        self._alpha = alpha
        self._beta = 0.4

    @property
    def alpha(self) -> float:
        """Exponent of priorities."""
        return self._alpha

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        if self.core is not None:
            remedy = "Set it before the first add, or after clear()."
            raise SchemaError(explain("alpha", f"{self._alpha} for the rows that are stored", alpha, remedy))
        self._alpha = alpha

    def _make_sampler(self) -> Sampler:
        return rl.Prioritized(alpha=self._alpha, beta=lambda _: self._beta, eps=0.0, normalize="global")

    def sample(self, batch_size: int, return_idx: bool = False, *, beta: float = 0.4) -> TensorDict:
        """Draw `batch_size` rows with their importance "weights" and "idxs", each `[B, 1]`."""
        core, self._beta = self._require_core(), beta
        batch = core.sample(operator.index(batch_size))
        weights, idxs = batch["weight"].unsqueeze(1), self._to_global_ids(batch["index"]).unsqueeze(1)
        return to_batch(batch["action"], weights=weights, idxs=idxs)

    def update_priorities(self, indices: Any, priorities: Any) -> None:
        """Set the priorities of the rows `indices`; values below 1e-5 become 1e-5."""
        index = torch.as_tensor(indices, device=self.device).reshape(-1).long() - self._first_id
        clamped_priorities = (
            torch.as_tensor(priorities, dtype=torch.float64, device=self.device).reshape(-1).clamp(min=1e-5)
        )
        if len(index) != len(clamped_priorities):
            remedy = "Pass a priority for each index."
            raise SchemaError(explain("priorities", f"{len(index)} numbers", len(clamped_priorities), remedy))
        if len(index):
            if self._first_id:
                # Rows that `clear` removed have negative ids here, so their priorities are skipped.
                index, clamped_priorities = index[index >= 0], clamped_priorities[index >= 0]
            self._require_core().update_priority(index, clamped_priorities)

    def _update_priority(self, idx: int, priority: float) -> None:
        """Set the priority of the row in slot `idx` of `storage`."""
        if not 0 <= idx < self.size:
            raise AssertionError(f"idx: expected a stored slot below {self.size}, got {idx}.")
        self._require_core().update_priority(
            self._convert_slots_to_ids([idx]), torch.tensor([priority], dtype=torch.float64, device="cpu")
        )

    def _convert_slots_to_ids(self, slots: Any) -> torch.Tensor:
        """Return the core's id of the row in each of these slots of `storage`."""
        newest = self._num_written - 1
        slots = torch.as_tensor(slots, device=self.device)
        return newest - (newest - slots) % self.max_size

    @property
    def max_priority(self) -> float:
        """The largest priority so far, which new rows get."""
        sampler: Any = None if self.core is None else self.core.sampler
        return 1.0 if sampler is None else sampler.merge_max_priority()

    @property
    def sum_tree(self) -> SumSegmentTree:
        """A copy of priority^alpha per slot of `storage`; 0 in empty slots. Writing to it sets priorities."""
        return SumSegmentTree.from_leaves(self._copy_priority_masses(), self._write_priority_masses)

    @property
    def min_tree(self) -> MinSegmentTree:
        """A copy of priority^alpha per slot of `storage`; infinite in empty slots. Writing to it sets priorities."""
        masses = self._copy_priority_masses()
        return MinSegmentTree.from_leaves(np.where(masses == 0, np.inf, masses), self._write_priority_masses)

    @property
    def tree_ptr(self) -> int:
        """Slot of the row that is added next."""
        return self._cursor

    def _copy_priority_masses(self) -> np.ndarray:
        """Return priority^alpha per slot of `storage`; 0 in empty slots."""
        sampler: Any = None if self.core is None else self.core.sampler
        return np.zeros(self.max_size) if sampler is None else sampler.masses().numpy(force=True)

    def _write_priority_masses(self, slots: np.ndarray, masses: np.ndarray) -> None:
        if self._alpha == 0:
            remedy = "Call update_priorities."
            raise SchemaError(explain("tree", "alpha above 0, to tell priorities from leaves", 0, remedy))
        priority = torch.as_tensor(np.asarray(masses, np.float64) ** (1 / self._alpha), device="cpu")
        self._require_core().update_priority(self._convert_slots_to_ids(slots), priority)


BufferType = ReplayBuffer | PrioritizedReplayBuffer | MultiStepReplayBuffer


def _broadcast_flags(flags: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """Reshape flags [B] to broadcast against a leaf [B, …]."""
    return flags.view(-1, *(1,) * (leaf.ndim - 1))


def _select_rows(is_flagged: torch.Tensor, flagged_rows: Any, other_rows: Any) -> Any:
    """Return a tree of `flagged_rows` where `is_flagged` is True, and of `other_rows` elsewhere."""
    return map_tree(lambda x, y: torch.where(_broadcast_flags(is_flagged, x), x, y), flagged_rows, other_rows)
