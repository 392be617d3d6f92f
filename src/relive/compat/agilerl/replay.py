"""AgileRL's replay buffers on ours: rows are TensorDicts with whatever names they come with."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from tensordict import TensorDict

import relive as rl
from relive.compat.agilerl.trees import MinSegmentTree, SumSegmentTree
from relive.errors import SchemaError, explain
from relive.fields.schema import Field, positive
from relive.kernels.shuffling import shuffled
from relive.randomness import Randomness
from relive.replay.samplers import Sampler

_DISTINCT_BELOW = 16_384
"""The rows of a batch differ while fewer than this are stored; from here on they are drawn with replacement."""


class ReplayBuffer:
    """AgileRL's `ReplayBuffer`: the newest `max_size` rows of TensorDicts, shaped by the first `add`.

    Rows are stored in the dtypes they come in; `dtype` is only kept. `core` is the relive buffer underneath, which
    has them as its field "row"; None before the first `add`. `seed` makes draws repeatable. A pickled buffer goes on
    with the same draws.

    What is different here: what is added is copied and not reshaped in place, a batch may be larger than the buffer,
    `clear` forgets all there is, and "idxs" are the rows' identities, so that an index of a row that has been
    overwritten is never taken for another row. Until the first overwriting they are the slots 0, 1, 2, …
    """

    def __init__(
        self,
        max_size: int,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        seed: int | None = None,
    ) -> None:
        self.max_size = positive("max_size", max_size)
        self.device = device
        self.dtype = dtype
        self.counter = 0
        """How many rows were ever added; `clear` does not change it."""
        self.core: rl.ReplayBuffer | None = None
        self._fields: dict[str, Any] = {}
        self._random = Randomness(seed)
        self._written = 0
        """How many rows the core was given."""
        self._before = 0
        """How many rows there were before it: what its ids lack to the rows' identities."""

    def _sampler(self) -> Sampler:
        return rl.Uniform()

    def _made(self, fields: dict[str, Any]) -> rl.ReplayBuffer:
        """A core for such rows; its own fields stay empty, since rows have any names and no order."""
        return rl.ReplayBuffer(
            self.max_size, (), (), extra={"row": fields}, sampler=self._sampler(), device=self.device,
            next_obs="stored", seed=self._random.seed(),
        )  # fmt: skip

    @property
    def initialized(self) -> bool:
        """Whether a first row has said what rows are."""
        return self.core is not None

    @property
    def storage(self) -> TensorDict | None:
        """The memory of the rows `[max_size]`, or None before anything is added."""
        return None if self.core is None else self.core.columns["row"].squeeze(1)

    @property
    def size(self) -> int:
        """Number of transitions in the buffer. Setting it says that so many first rows of `storage` are stored."""
        return 0 if self.core is None else len(self.core)

    @size.setter
    def size(self, size: int) -> None:
        if self.core is None or not 0 < size <= self.max_size:
            expected = f"1 to {self.max_size} after the first add"
            raise SchemaError(explain("size", expected, size, "Add rows first, or call clear() to remove all of them."))
        rows, counter = self.core.columns["row"][:size].squeeze(1).clone(), self.counter
        ReplayBuffer.clear(self)
        ReplayBuffer.add(self, rows)
        self.counter = counter

    _size, _storage = size, storage

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
        data = data.to(self.device)
        if data.ndim != 1:
            remedy = "Give the transitions one batch axis, as in batch_size=[num_envs]."
            raise SchemaError(explain("add", "a TensorDict of batch size [B]", list(data.batch_size), remedy))
        rows = _columns(data)
        fields = _fields(rows) if self.core is None else self._fields
        core = self._made(fields) if self.core is None else self.core
        nothing = torch.zeros(len(data), device=core.device)
        never = torch.zeros(len(data), dtype=torch.bool, device=core.device)
        unused = {"obs": nothing, "action": nothing, "reward": nothing, "next_obs": nothing.clone()}
        core.extend({**unused, "terminated": never, "truncated": never, "row": rows})
        self.core, self._fields = core, fields
        self._written += len(data)
        self.counter += len(data)

    def sample(self, batch_size: int, return_idx: bool = False, *, beta: float = 0.4) -> TensorDict:
        """`batch_size` rows, or all there are; with `return_idx` their indices as "idxs" `[B]`. `beta` is not used."""
        core = self._require_rows()
        size, count = len(core), positive("batch_size", min(batch_size, len(core)))
        oldest = self._written - size
        if size < _DISTINCT_BELOW:
            rows = shuffled(torch.arange(oldest, self._written, device=core.device), self._random)[:count]
        else:
            rows = oldest + self._random.below(torch.tensor(size, device=core.device), count)
        batch = core[rows]
        if return_idx:
            batch["row"]["idxs"] = batch["index"] + self._before
        return batch["row"]

    def _require_rows(self) -> rl.ReplayBuffer:
        if self.core is None:
            raise AssertionError("Cannot sample from an empty buffer.")
        return self.core

    def clear(self) -> None:
        """Forget every row; the next `add` may have other fields."""
        self._before += self._written
        self._written = 0
        self.core = None

    def __getstate__(self) -> dict[str, Any]:
        core = None if self.core is None else self.core.state_dict()
        return {**vars(self), "core": core, "_random": self._random.snapshot()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._random = Randomness()
        if state["core"] is not None:
            self.core = self._made(self._fields)
            self.core.load_state_dict(state["core"])
        self._random.restore(state["_random"])


class MultiStepReplayBuffer(ReplayBuffer):
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
        super().__init__(max_size, device, dtype, seed=seed)
        self.n_step = positive("n_step", n_step)
        self.gamma = gamma
        self.n_step_buffer: deque[TensorDict] = deque(maxlen=n_step)
        self.reward_key = "reward"
        self.done_key: str | None = None
        self.ns_key = "next_obs"

    def add(self, data: TensorDict) -> TensorDict | None:
        """Store one step of every environment; returns the step that left the window, if it was full."""
        done_key = self.done_key or self._find_keys(data)
        data = data.to(self.device).clone()
        known = self.n_step_buffer[-1] if self.n_step_buffer else data
        expected, got = ((list(step.batch_size), _fields(step.to_dict())) for step in (known, data))
        if got != expected:
            remedy = "Add the same fields for all environments in every call."
            raise SchemaError(explain("add", f"batch size and fields {expected} as before", got, remedy))
        window = [*self.n_step_buffer, data][-self.n_step :]
        if len(window) == self.n_step:
            super().add(self._n_steps(window, done_key))
        self.n_step_buffer.append(data)
        self.done_key = done_key
        return window[0] if len(window) == self.n_step else None

    def _find_keys(self, data: TensorDict) -> str:
        names = ("done", "termination", "terminated")
        done = next((name for name in names if name in data.keys()), None)
        if self.reward_key not in data.keys():
            raise AssertionError(f"Reward key not found in transition. Expected key: {self.reward_key}")
        if self.ns_key not in data.keys():
            raise AssertionError(f"Next observation key not found in transition. Expected key: {self.ns_key}")
        if done is None:
            raise AssertionError(f"No done/termination key found in transition. Expected keys: {list(names)}")
        return done

    def _n_steps(self, steps: list[TensorDict], done_key: str) -> TensorDict:
        """The oldest of the steps with the reward, the end and the next observation of all of them."""
        ends = (done_key, self.ns_key)
        window: Any = torch.stack([step.select(self.reward_key, *ends) for step in steps])
        ended = window[done_key].bool().flatten(1).view(*window.batch_size, -1).any(-1)
        reward = window[self.reward_key]
        total = rl.discounted_return(reward, ended, torch.zeros_like(ended), gamma=self.gamma)[0]
        last = torch.where(ended.any(0), ended.int().argmax(0), self.n_step - 1)
        env = torch.arange(len(last), device=last.device)
        row = steps[0].copy()
        row[self.reward_key] = total.to(reward.dtype) if reward.is_floating_point() else total
        for key in ends:
            row[key] = window[key][last, env]
        return row

    def sample_from_indices(self, idxs: torch.Tensor) -> TensorDict:
        """The rows that another buffer, fed with what `add` returned, knows by `idxs`."""
        return self._require_rows()[idxs.reshape(-1) - self._before]["row"].view(*idxs.shape)

    def clear(self) -> None:
        """Forget every row, and the steps of the window."""
        super().clear()
        self.n_step_buffer.clear()
        self.done_key = None


class PrioritizedReplayBuffer(ReplayBuffer):
    """AgileRL's `PrioritizedReplayBuffer`: row i is drawn with probability p_i^alpha / Σ p^alpha.

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
        super().__init__(max_size, device, dtype, seed=seed)
        self.alpha = alpha
        self._beta = 0.4

    def _sampler(self) -> Sampler:
        return rl.Prioritized(alpha=self.alpha, beta=lambda _: self._beta, eps=0.0, normalize="global")

    def sample(self, batch_size: int, return_idx: bool = False, *, beta: float = 0.4) -> TensorDict:
        """`batch_size` rows with their importance "weights" and "idxs", each `[B, 1]`."""
        core, self._beta = self._require_rows(), beta
        batch = core.sample(batch_size)
        rows = batch["row"]
        rows["weights"], rows["idxs"] = batch["weight"].unsqueeze(1), batch["index"].unsqueeze(1) + self._before
        return rows

    def update_priorities(self, indices: Any, priorities: Any) -> None:
        """Give rows new priorities, of at least 1e-5."""
        index = torch.as_tensor(indices, device=self.device).reshape(-1).long() - self._before
        raised = torch.as_tensor(priorities, dtype=torch.float64, device=self.device).reshape(-1).clamp(min=1e-5)
        if len(index) != len(raised):
            remedy = "Pass a priority for each index."
            raise SchemaError(explain("priorities", f"{len(index)} numbers", len(raised), remedy))
        if len(index):
            since = index >= 0  # of what was there before clear() nothing is left
            self._require_rows().update_priority(index[since], raised[since])

    @property
    def max_priority(self) -> float:
        """The largest priority given to a stored row so far: what new rows have."""
        return 1.0 if self.core is None else float(self.core.state_dict()["arrays"]["sampler.largest"])

    @property
    def sum_tree(self) -> SumSegmentTree:
        """priority^alpha of every slot of `storage`, as it is now."""
        return SumSegmentTree(self._leaves())

    @property
    def min_tree(self) -> MinSegmentTree:
        """The same, infinite where nothing is stored."""
        leaves = self._leaves()
        return MinSegmentTree(leaves.masked_fill(leaves == 0, float("inf")))

    @property
    def tree_ptr(self) -> int:
        """The slot of the coming row."""
        return self._cursor

    def _leaves(self) -> torch.Tensor:
        if self.core is None:
            return torch.zeros(self.max_size, dtype=torch.float64)
        return self.core.state_dict()["arrays"]["sampler.mass"].clone()


def _columns(data: TensorDict) -> dict[str, Any]:
    return {
        key: _columns(item) if isinstance(item, TensorDict) else item.unsqueeze(1) if item.ndim == 1 else item
        for key, item in data.items()
    }


def _fields(columns: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _fields(item) if isinstance(item, dict) else Field(tuple(item.shape[1:]), item.dtype)
        for key, item in columns.items()
    }
