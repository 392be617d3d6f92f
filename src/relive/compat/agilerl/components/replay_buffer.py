"""AgileRL's replay buffers on ours: rows are TensorDicts with whatever names they come with."""

from __future__ import annotations

import operator
from collections import deque
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

import relive as rl
from relive.checkpoint.state_dict import load_packed_state, packed_state
from relive.compat.agilerl.components.segment_tree import MinSegmentTree, SumSegmentTree
from relive.compat.agilerl.rows import Memory, columns, original, to_batch
from relive.compat.pickling import restores
from relive.compat.seeding import experiment_seed
from relive.compat.views import map_tree
from relive.errors import SchemaError, explain
from relive.locking import use_copy
from relive.replay.samplers import Sampler
from relive.schema.checks import positive
from relive.schema.fields import Field

_DISTINCT_BELOW = 16_384
"""The rows of a batch differ while fewer than this are stored; from here on they are drawn with replacement."""

_Plain: Any = original("components.replay_buffer", "ReplayBuffer")
_MultiStep: Any = original("components.replay_buffer", "MultiStepReplayBuffer")
_ByPriority: Any = original("components.replay_buffer", "PrioritizedReplayBuffer")


class ReplayBuffer(_Plain):
    """AgileRL's `ReplayBuffer`: the newest `max_size` rows of TensorDicts, shaped by the first `add`.

    Rows are stored in the dtypes they come in; `dtype` is only kept. `core` is the relive buffer underneath, which
    has them as its field "action"; None before the first `add`. `seed` makes draws repeatable, and so does a seed of
    torch. A pickled buffer goes on with the same draws.

    What is different here: what is added is copied and not reshaped in place, `clear` forgets all there is, and "idxs"
    are the rows' identities, so that an index of a row that has been overwritten is never taken for another row. Until
    the first overwriting they are the slots 0, 1, 2, …
    """

    def __init__(
        self,
        max_size: int,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        seed: int | None = None,
    ) -> None:
        self.max_size = 0 if max_size == 0 else positive("max_size", max_size)  # 0: a subclass keeps its rows itself
        self.device = device
        self.dtype = dtype
        self.counter = 0
        """How many rows were ever added; `clear` does not change it."""
        self.core: rl.ReplayBuffer | None = None
        self._fields: dict[str, Any] = {}
        self._random = np.random.default_rng(experiment_seed(seed))
        self._rows: TensorDict | None = None
        """The memory of the core's rows."""
        self._written = 0
        """How many rows the core was given."""
        self._before = 0
        """How many rows there were before it: what its ids lack to the rows' identities."""
        self._claimed = 0

    def _sampler(self) -> Sampler:
        return rl.Uniform()

    def _new_core(self, fields: dict[str, Any]) -> rl.ReplayBuffer:
        """A core for such rows; its other fields stay empty, since rows have any names and no order."""
        return rl.ReplayBuffer(
            self.max_size, (), fields, sampler=self._sampler(), device=self.device, next_obs="stored",
            seed=self._next_seed(),
        )  # fmt: skip

    def _next_seed(self) -> int:
        return int(self._random.integers(2**62))

    @property
    def initialized(self) -> bool:
        """Whether a first row has said what rows are."""
        return self.core is not None

    @property
    def storage(self) -> TensorDict | None:
        """The memory of the rows `[max_size]`, or None before anything is added. What is written there is stored."""
        if self._rows is None and self.core is not None:
            rows: Any = self.core.columns["action"].squeeze(1)
            self._rows = Memory(dict(rows.items()), batch_size=rows.batch_size, device=self.core.device).lock_()
        return self._rows

    @property
    def size(self) -> int:
        """How many rows are stored. Setting it says that so many first rows of `storage` are stored.

        Before the first `add` it is only a number, for a subclass that keeps its rows itself.
        """
        return self._claimed if self.core is None else len(self.core)

    @size.setter
    def size(self, size: int) -> None:
        if self.storage is None:
            self._claimed = size
            return
        if not 0 <= size <= self.max_size:
            raise SchemaError(explain("size", f"0 to {self.max_size}", size, "Add rows instead."))
        rows, counter = self.storage.clone(), self.counter
        ReplayBuffer.clear(self)
        self.core = self._new_core(self._fields)
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
        """The slot of the coming row."""
        return self._written % self.max_size

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
        self._store(columns(data, torch.device(self.device)), len(data))

    def _store(self, rows: dict[str, Any], count: int) -> None:
        core, fields = self.core, self._fields
        if core is None:
            fields = map_tree(lambda leaf: Field(tuple(leaf.shape[1:]), leaf.dtype), rows)
            core = self._new_core(fields)
        nothing = torch.zeros(2, count, device=core.device)
        never = torch.zeros(count, dtype=torch.bool, device=core.device)
        unused = {"obs": nothing[0], "reward": nothing[0], "next_obs": nothing[1], "terminated": never}
        core.extend({**unused, "truncated": never, "action": rows})
        self.core, self._fields = core, fields
        self._written += count
        self.counter += count

    def sample(self, batch_size: int, return_idx: bool = False, *, beta: float = 0.4) -> TensorDict:
        """`batch_size` rows, or all there are; with `return_idx` their indices as "idxs" `[B]`. `beta` is not used."""
        core = self._require_rows()
        size, count = len(core), max(min(operator.index(batch_size), len(core)), 0)
        if size < _DISTINCT_BELOW:
            drawn = torch.from_numpy(self._random.choice(size, count, replace=False))
        else:
            drawn = torch.randint(
                size, (count,), generator=torch.Generator().manual_seed(self._next_seed()), device="cpu"
            )
        batch = core.read((drawn + (self._written - size)).to(core.device))
        return to_batch(batch["action"], **({"idxs": self._identities(batch["index"])} if return_idx else {}))

    def _identities(self, index: torch.Tensor) -> torch.Tensor:
        """The core's ids, counted from the first `add` of all instead of the last `clear`."""
        return index + self._before if self._before else index

    def _require_rows(self) -> rl.ReplayBuffer:
        if self.core is None:
            raise AssertionError(explain("sample", "stored rows", "an empty buffer", "Call add first."))
        return self.core

    def clear(self) -> None:
        """Forget every row; the next `add` may have other fields."""
        self._before += self._written
        self._written = self._claimed = 0
        self.core = self._rows = None

    def draw_from_copy(self, seed: int) -> None:
        """In a child process: draw from its copy of the rows, by a generator of its own."""
        self._random = np.random.default_rng(seed)
        if self.core is not None:
            use_copy(self.core)
            self.core._random.restore(self.core.storage.random(self._next_seed()).snapshot())

    def __getstate__(self) -> dict[str, Any]:
        core = None if self.core is None else packed_state(self.core)
        return {**vars(self), "core": core, "_rows": None}

    @restores
    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if state["core"] is not None:
            draws = self._random.bit_generator.state
            self.core = self._new_core(self._fields)
            load_packed_state(self.core, state["core"])
            self._random.bit_generator.state = draws


class MultiStepReplayBuffer(ReplayBuffer, _MultiStep):
    """AgileRL's `MultiStepReplayBuffer`: rows of n steps, reward Σ γ^i r up to the first end, next_obs and done there.

    `add` takes one step of every environment and returns the oldest step of the window, which is the one whose n steps
    were stored; None while the window fills.

    What is different here: an end of the first step counts, an end in one environment is none in the others, nested
    next observations work, rewards that are integers become floats, and `clear` empties the window.
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
        self.n_step = positive("n_step", n_step)
        self.gamma = gamma
        self.n_step_buffer: deque[TensorDict] = deque(maxlen=n_step)
        self.reward_key = "reward"
        self.done_key: str | None = None
        self.ns_key = "next_obs"

    def add(self, data: TensorDict) -> TensorDict | None:
        """Store one step of every environment; returns the step that left the window, if it was full."""
        done_key = self.done_key or self._find_keys(data)
        there = torch.device(self.device)
        data = data.clone() if data.device in (None, there) else data.to(there).clone()
        self._check_alike(data)
        window = [*self.n_step_buffer, data][-self.n_step :]
        is_full = len(window) == self.n_step
        if is_full:
            self._store(self._n_steps(window, done_key), len(data))
        self.n_step_buffer.append(data)
        self.done_key = done_key
        return window[0] if is_full else None

    def _check_alike(self, data: TensorDict) -> None:
        """Raise unless this step has the fields and the environments of the step before."""
        known = self.n_step_buffer[-1] if self.n_step_buffer else data
        expected, got = (
            (list(step.batch_size), map_tree(lambda leaf: (tuple(leaf.shape), leaf.dtype), step))
            for step in (known, data)
        )
        if got != expected:
            remedy = "Add the same fields for all environments in every call."
            raise SchemaError(explain("add", f"batch size and fields {expected} as before", got, remedy))

    def _find_keys(self, data: TensorDict) -> str:
        names = ("done", "termination", "terminated")
        done = next((name for name in names if name in data.keys()), None)
        missing = [name for name in (self.reward_key, self.ns_key) if name not in data.keys()]
        if done is None or missing:
            expected = f"{self.reward_key!r}, {self.ns_key!r} and one of {names}"
            got = f"{sorted(map(str, data.keys()))}"
            raise AssertionError(explain("add", expected, got, "Name the fields so, or set reward_key and ns_key."))
        return done

    def _get_n_step_info(self) -> TensorDict:
        """The row of the steps in the window."""
        steps = list(self.n_step_buffer)
        rows: Any = self._n_steps(steps, self.done_key or self._find_keys(steps[0]))
        return TensorDict(rows, batch_size=steps[0].batch_size)

    def _n_steps(self, steps: list[TensorDict], done_key: str) -> dict[str, Any]:
        """The oldest of the steps with the reward, the end and the next observation of all of them."""
        rewards = (step[self.reward_key] for step in reversed(steps))
        total, *earlier = (reward if reward.is_floating_point() else reward.float() for reward in rewards)
        at_end = {key: steps[-1][key] for key in (done_key, self.ns_key)}
        for step, reward in zip(reversed(steps[:-1]), earlier, strict=True):
            ended = step[done_key].bool().reshape(len(step), -1).any(1)
            if ended.any():
                total = total.masked_fill(_along(ended, total), 0)
                at_end = {key: _where(ended, step[key], later) for key, later in at_end.items()}
            total = reward + self.gamma * total
        return columns({**dict(steps[0].items()), self.reward_key: total, **at_end}, total.device)

    def sample_from_indices(self, idxs: torch.Tensor) -> TensorDict:
        """The rows that another buffer, fed with what `add` returned, knows by `idxs`."""
        flat = idxs if idxs.ndim == 1 else idxs.reshape(-1)
        rows = to_batch(self._require_rows().read(flat - self._before if self._before else flat)["action"])
        return rows if idxs.ndim == 1 else rows.view(*idxs.shape)

    def clear(self) -> None:
        """Forget every row, and the steps of the window."""
        super().clear()
        self.n_step_buffer.clear()
        self.done_key = None


class PrioritizedReplayBuffer(ReplayBuffer, _ByPriority):
    """AgileRL's `PrioritizedReplayBuffer`: row i is drawn with probability p_i^alpha / Σ p^alpha.

    `alpha` can be set until the first row is added. Writing to `sum_tree` or `min_tree` writes priorities.

    What is different here: `clear` forgets priorities too, a priority that is not a number is refused, and one for a
    row that has been overwritten since is skipped.
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
        """How much priorities count."""
        return self._alpha

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        if self.core is not None:
            remedy = "Set it before the first add, or after clear()."
            raise SchemaError(explain("alpha", f"{self._alpha} for the rows that are stored", alpha, remedy))
        self._alpha = alpha

    def _sampler(self) -> Sampler:
        return rl.Prioritized(alpha=self._alpha, beta=lambda _: self._beta, eps=0.0, normalize="global")

    def sample(self, batch_size: int, return_idx: bool = False, *, beta: float = 0.4) -> TensorDict:
        """`batch_size` rows with their importance "weights" and "idxs", each `[B, 1]`."""
        core, self._beta = self._require_rows(), beta
        batch = core.sample(operator.index(batch_size))
        weights, idxs = batch["weight"].unsqueeze(1), self._identities(batch["index"]).unsqueeze(1)
        return to_batch(batch["action"], weights=weights, idxs=idxs)

    def update_priorities(self, indices: Any, priorities: Any) -> None:
        """Give rows new priorities, of at least 1e-5."""
        index = torch.as_tensor(indices, device=self.device).reshape(-1).long() - self._before
        raised = torch.as_tensor(priorities, dtype=torch.float64, device=self.device).reshape(-1).clamp(min=1e-5)
        if len(index) != len(raised):
            remedy = "Pass a priority for each index."
            raise SchemaError(explain("priorities", f"{len(index)} numbers", len(raised), remedy))
        if len(index):
            if self._before:  # rows from before clear() are gone
                index, raised = index[index >= 0], raised[index >= 0]
            self._require_rows().update_priority(index, raised)

    def _update_priority(self, idx: int, priority: float) -> None:
        """Give the row in slot `idx` of `storage` a new priority."""
        if not 0 <= idx < self.size:
            raise AssertionError(f"idx: expected a stored slot below {self.size}, got {idx}.")
        self._require_rows().update_priority(
            self._rows_in([idx]), torch.tensor([priority], dtype=torch.float64, device="cpu")
        )

    def _rows_in(self, slots: Any) -> torch.Tensor:
        """The core's ids of the rows in these slots of `storage`."""
        newest = self._written - 1
        slots = torch.as_tensor(slots, device=self.device)
        return newest - (newest - slots) % self.max_size

    @property
    def max_priority(self) -> float:
        """The largest priority given to a stored row so far: what new rows have."""
        return 1.0 if self.core is None else float(self.core.state_dict()["arrays"]["sampler.largest"])

    @property
    def sum_tree(self) -> SumSegmentTree:
        """priority^alpha of every slot of `storage`, as it is now; 0 where nothing is stored."""
        return SumSegmentTree.of(self._leaves(), self._write_leaves)

    @property
    def min_tree(self) -> MinSegmentTree:
        """priority^alpha of every slot of `storage`, as it is now; infinite where nothing is stored."""
        leaves = self._leaves()
        return MinSegmentTree.of(np.where(leaves == 0, np.inf, leaves), self._write_leaves)

    @property
    def tree_ptr(self) -> int:
        """The slot of the coming row."""
        return self._cursor

    def _leaves(self) -> np.ndarray:
        if self.core is None:
            return np.zeros(self.max_size)
        return self.core.state_dict()["arrays"]["sampler.mass"].numpy(force=True)

    def _write_leaves(self, slots: np.ndarray, leaves: np.ndarray) -> None:
        if self._alpha == 0:
            remedy = "Call update_priorities."
            raise SchemaError(explain("tree", "alpha above 0, to tell priorities from leaves", 0, remedy))
        priority = torch.as_tensor(np.asarray(leaves, np.float64) ** (1 / self._alpha), device="cpu")
        self._require_rows().update_priority(self._rows_in(slots), priority)


BufferType = ReplayBuffer | PrioritizedReplayBuffer | MultiStepReplayBuffer


def _along(rows: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """Flags [B] with as many axes as a leaf [B, …]."""
    return rows.view(-1, *(1,) * (leaf.ndim - 1))


def _where(rows: torch.Tensor, one: Any, other: Any) -> Any:
    """`one` in the rows that are flagged, `other` in the rest, of every leaf."""
    return map_tree(lambda this, that: torch.where(_along(rows, this), this, that), one, other)
