"""AgileRL's replay buffers on ours: rows are TensorDicts with whatever names they come with."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from tensordict import TensorDict

import recollect as rc
from recollect.batch import assemble
from recollect.errors import SchemaError, explain
from recollect.randomness import Randomness
from recollect.samplers import Sampler
from recollect.schema import Field, Tree, positive

_DISTINCT_BELOW = 16_384
"""The rows of a batch differ while fewer than this are stored; from here on they are drawn with replacement."""


class ReplayBuffer:
    """AgileRL's `ReplayBuffer`: the newest `max_size` rows of TensorDicts, shaped by the first `add`.

    Rows are stored in the dtypes they come in; `dtype` is only kept. Corrected: what is added is copied and not
    reshaped in place, a batch may be larger than the buffer, `clear` forgets all there is, and "idxs" are the rows'
    identities, so that an index of a row that has been overwritten is never taken for another row. Until the first
    overwriting they are the slots 0, 1, 2, …
    """

    def __init__(self, max_size: int, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.max_size = positive("max_size", max_size)
        self.device = device
        self.dtype = dtype
        self.counter = 0
        """How many rows were ever added; `clear` does not change it."""
        self.initialized = False
        self._random = Randomness()
        self._fields: Tree | None = None

    def _sampler(self) -> Sampler:
        return rc.Uniform()

    @property
    def storage(self) -> TensorDict | None:
        """The memory of the rows `[max_size]`, or None before anything is added."""
        if not self.initialized:
            return None
        memory = self._rows._storage
        which = memory.schema.columns["row"]
        paths = [memory.schema.paths[i][1:] for i in which]
        return assemble(paths, [memory.columns[i].squeeze(1) for i in which], torch.Size((self.max_size,)))

    @property
    def size(self) -> int:
        """Number of transitions in the buffer."""
        return len(self._rows) if self.initialized else 0

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
        if not self.initialized:
            self._start(_fields(rows))
        nothing = torch.zeros(len(data), device=data.device)
        never = torch.zeros(len(data), dtype=torch.bool, device=data.device)
        unused = {"obs": nothing, "action": nothing, "reward": nothing, "next_obs": nothing.clone()}
        self._rows.extend({**unused, "terminated": never, "truncated": never, "row": rows})
        self.initialized = True
        self.counter += len(data)
        self._issued += len(data)

    def _start(self, fields: Tree) -> None:
        """Make room for rows of these fields; the core's own stay empty, since rows have any names and no order."""
        if fields != self._fields:
            self._rows = rc.ReplayBuffer(
                self.max_size, (), (), extra={"row": fields}, sampler=self._sampler(), device=self.device,
                next_obs="stored",
            )  # fmt: skip
            self._fields, self._issued = fields, 0

    def sample(self, batch_size: int, return_idx: bool = False, *, beta: float = 0.4) -> TensorDict:
        """`batch_size` rows, or all there are; with `return_idx` their indices as "idxs" `[B]`. `beta` is not used."""
        batch = self._drawn(min(batch_size, self.size))
        if return_idx:
            batch["row"]["idxs"] = batch["index"]
        return batch["row"]

    def _drawn(self, count: int) -> TensorDict:
        self._require_rows()
        if self.size >= _DISTINCT_BELOW:
            return self._rows.sample(count)
        stored = torch.arange(self._issued - self.size, self._issued, device=self._rows.device)
        return self._rows[self._random.shuffled(stored)[: positive("batch_size", count)]]

    def _require_rows(self) -> None:
        if not self.initialized:
            raise AssertionError("Cannot sample from an empty buffer.")

    def clear(self) -> None:
        """Forget every row; the next `add` may have other fields."""
        if self.initialized:
            self._rows.clear()
        self.initialized = False


class MultiStepReplayBuffer(ReplayBuffer):
    """AgileRL's `MultiStepReplayBuffer`: rows of n steps, reward Σ γ^i r up to the first end, next_obs and done there.

    `add` takes one step of every environment and returns the oldest step of the window, which is the one whose n steps
    were stored; None while the window fills. Corrected: an end of the first step counts, an end in one environment is
    none in the others, nested next observations work, and `clear` empties the window.
    """

    def __init__(
        self,
        max_size: int,
        n_step: int = 3,
        gamma: float = 0.99,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(max_size, device, dtype)
        self.n_step = positive("n_step", n_step)
        self.gamma = gamma
        self.n_step_buffer: deque[TensorDict] = deque(maxlen=n_step)
        self.reward_key = "reward"
        self.done_key: str | None = None
        self.ns_key = "next_obs"

    def add(self, data: TensorDict) -> TensorDict | None:
        """Store one step of every environment; returns the step that left the window, if it was full."""
        if self.done_key is None:
            self.done_key = self._find_keys(data)
        if self.n_step_buffer and data.batch_size != self.n_step_buffer[0].batch_size:
            expected, got = (list(step.batch_size) for step in (self.n_step_buffer[0], data))
            raise SchemaError(explain("add", f"batch size {expected} as before", got, "Add all environments at once."))
        self.n_step_buffer.append(data.to(self.device).clone())
        if len(self.n_step_buffer) < self.n_step:
            return None
        super().add(self._n_steps(self.done_key))
        return self.n_step_buffer[0]

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

    def _n_steps(self, done_key: str) -> TensorDict:
        """The oldest step of the window with the reward, the end and the next observation of all of it."""
        ends = (done_key, self.ns_key)
        window: Any = torch.stack([step.select(self.reward_key, *ends) for step in self.n_step_buffer])
        ended = window[done_key].bool().flatten(1).view(*window.batch_size, -1).any(-1)
        reward = window[self.reward_key]
        total = rc.discounted_return(reward, ended, torch.zeros_like(ended), gamma=self.gamma)[0]
        last = torch.where(ended.any(0), ended.int().argmax(0), self.n_step - 1)
        env = torch.arange(len(last), device=last.device)
        row = self.n_step_buffer[0].copy()
        row[self.reward_key] = total.to(reward.dtype)
        for key in ends:
            row[key] = window[key][last, env]
        return row

    def sample_from_indices(self, idxs: torch.Tensor) -> TensorDict:
        """The rows that another buffer, fed with what `add` returned, knows by `idxs`."""
        self._require_rows()
        return self._rows[idxs.reshape(-1)]["row"].view(*idxs.shape)

    def clear(self) -> None:
        """Forget every row, and the steps of the window."""
        super().clear()
        self.n_step_buffer.clear()
        self.done_key = None


class PrioritizedReplayBuffer(ReplayBuffer):
    """AgileRL's `PrioritizedReplayBuffer`: row i is drawn with probability p_i^alpha / Σ p^alpha.

    Corrected: `clear` forgets priorities too, a priority that is not a number is refused, and one for a row that has
    been overwritten since is skipped.
    """

    def __init__(
        self,
        max_size: int,
        alpha: float = 0.6,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(max_size, device, dtype)
        self.alpha = alpha
        self.max_priority = 1.0
        """The largest priority given so far: what new rows have."""
        self._beta = 0.4

    def _sampler(self) -> Sampler:
        return rc.Prioritized(alpha=self.alpha, beta=lambda _: self._beta, eps=0.0, normalize="global")

    def sample(self, batch_size: int, return_idx: bool = False, *, beta: float = 0.4) -> TensorDict:
        """`batch_size` rows with their importance "weights" and "idxs", each `[B, 1]`."""
        self._require_rows()
        self._beta = beta
        batch = self._rows.sample(batch_size)
        rows = batch["row"]
        rows["weights"], rows["idxs"] = batch["weight"].unsqueeze(1), batch["index"].unsqueeze(1)
        return rows

    def update_priorities(self, indices: Any, priorities: Any) -> None:
        """Give rows new priorities, of at least 1e-5."""
        index = torch.as_tensor(indices, device=self.device).reshape(-1).long()
        if len(index):
            raised = torch.as_tensor(priorities, dtype=torch.float64, device=self.device).reshape(-1).clamp(min=1e-5)
            self._rows.update_priority(index, raised)
            self.max_priority = max(self.max_priority, float(raised.max()))

    def clear(self) -> None:
        """Forget every row and its priority."""
        super().clear()
        self.max_priority = 1.0


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
