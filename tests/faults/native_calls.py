"""Calls of the native core with valid arguments, except one or two that are almost valid.

    python -m tests.faults.native_calls SEED FIRST COUNT

runs trials FIRST to FIRST + COUNT. A trial makes one object of the core and calls some of its methods, or calls one
function; it depends on SEED and its own number only. Each call must give a result or a Python exception: a crash ends
this process, a hang ends it after a minute, and the number in the file of RELIVE_NATIVE_TRIAL names the trial.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import random
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relive.kernels import _native

NUMBERS = sorted(
    {sign * (2**power + near) for sign in (1, -1) for power in (31, 32, 40, 62, 63, 64) for near in (-1, 0, 1)}
)
FLOATS = (float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 0.5, 1.5, 1e308, -1e308, 1e-320)
OBJECTS = (None, True, False, "text", b"bytes", [], (), {}, object(), 10**400, 1j)
DTYPES = (
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.complex64,
)
NOT_CALLED = {"plant": "the mistakes of sanitizer builds"}

Arguments = tuple[Any, ...]


class Near(random.Random):
    """Random choices of one trial, and values close to valid ones."""

    def value(self, right: Any) -> Any:  # noqa: PLR0911 (one for each type)
        """Return a value close to `right`."""
        if self.random() < 0.1:
            return self.choice(OBJECTS)
        if isinstance(right, bool):
            return self.choice((not right, *OBJECTS))
        if isinstance(right, int):
            return self.choice((right - 1, right + 1, 0, -1, -2, 2 * right, float(right), *FLOATS[:2], *NUMBERS))
        if isinstance(right, float):
            return self.choice((*FLOATS, 0, 1, 10**400))
        if isinstance(right, torch.Tensor):
            return self.tensor(right)
        if isinstance(right, np.ndarray):
            return self.array(right)
        if isinstance(right, list | tuple):
            return self.items(right)
        if isinstance(right, dict):
            return self.mapping(right)
        return self.choice((*OBJECTS, 0, 1.0, right))

    def tensor(self, right: torch.Tensor) -> Any:  # noqa: PLR0911 (one for each kind of change)
        """Return a tensor or array with nearly the shape, dtype, strides and numbers of `right`."""
        kind = self.randrange(11)
        if kind == 0:
            return torch.zeros(right.shape, dtype=self.choice(DTYPES))
        if kind == 1:
            return torch.zeros([max(0, size + self.choice((-1, 0, 1))) for size in right.shape], dtype=right.dtype)
        if kind == 2:
            return torch.cat([right[None], right[None]])[self.randrange(2)] if self.random() < 0.5 else right[None]
        if kind == 3 and right.ndim:  # not contiguous
            return torch.cat([right, right])[::2]
        if kind == 4:
            return right.new_zeros(()).expand(right.shape)
        if kind == 5:
            return right.to("meta")
        if kind == 6:
            return right.new_empty(self.choice(((0,), (2**40, 0), (0, 2**40), (2**62, 0, 1), (), (1,) * 17)))
        if kind == 7:
            return self.array(right.numpy())
        if kind == 8:
            return right.reshape(-1) if right.ndim > 1 else right.reshape(-1, 1)
        if right.dtype == torch.int64 and right.numel():
            changed = right.clone()
            changed.view(-1)[self.randrange(right.numel())] = self.choice(
                [-1, -2, int(right.max()) + 1, 2**31, *(n for n in NUMBERS if -(2**63) <= n < 2**63)]
            )
            return changed
        if right.is_floating_point() and right.numel():
            return right.new_zeros(right.shape) + torch.tensor(self.choice(FLOATS)).to(right.dtype)
        return right.tolist()

    def array(self, right: np.ndarray) -> Any:  # noqa: PLR0911 (one for each kind of change)
        """Return a numpy array close to `right`."""
        kind = self.randrange(7)
        if kind == 0:
            fixed = right.copy()
            fixed.flags.writeable = False
            return fixed
        if kind == 1:
            return right.astype(right.dtype.newbyteorder(">"))
        if kind == 2:
            return np.frombuffer(b"\x02" * (right.nbytes + 8), np.uint8)[1 : 1 + right.nbytes].view(right.dtype)
        if kind == 3:
            return right[::-1] if right.ndim else right[None]
        if kind == 4:
            return memoryview(right)  # pyright: ignore[reportArgumentType]
        if kind == 5 and right.dtype == bool:
            return np.full(right.shape, 2, np.uint8).view(bool)
        return right.astype(self.choice((object, "S0", "datetime64[s]", np.float16, np.uint64)))

    def items(self, right: list[Any] | tuple[Any, ...]) -> Any:
        """Return a list or tuple with an item more, less, or changed."""
        made = list(right)
        kind = self.randrange(6)
        if kind == 0:
            return tuple(right) if isinstance(right, list) else made
        if kind == 1:
            made.append(made[-1] if made else self.choice(OBJECTS))
        elif kind == 2 and made:
            made.pop()
        elif kind == 3 and made:
            self.shuffle(made)
        elif made:
            place = self.randrange(len(made))
            made[place] = self.value(made[place])
        return type(right)(made)

    def mapping(self, right: dict[Any, Any]) -> dict[Any, Any]:
        """Return a dict with a key more, less, or a changed value."""
        made = dict(right)
        key = self.choice([*right, "another", 3])
        if self.random() < 0.3:
            made.pop(key, None)
        else:
            made[key] = self.value(made.get(key))
        return made

    def arguments(self, right: Arguments) -> Arguments:
        """Return arguments with up to two changed."""
        made = list(right)
        for place in self.sample(range(len(made)), min(len(made), self.choice((0, 1, 1, 1, 2)))):
            made[place] = self.value(made[place])
        if self.random() < 0.02:
            made = made[:-1] if self.random() < 0.5 else [*made, self.choice(OBJECTS)]
        return tuple(made)


def ints(near: Near, count: int, end: int, lowest: int = 0) -> torch.Tensor:
    """Return random integers from `lowest` to `end` - 1."""
    return torch.tensor([near.randrange(lowest, max(end, lowest + 1)) for _ in range(count)], dtype=torch.int64)


def flags(near: Near, *shape: int) -> torch.Tensor:
    return torch.tensor([near.random() < 0.3 for _ in range(int(np.prod(shape)))], dtype=torch.bool).view(shape)


def bits(near: Near) -> Any:
    """Return the capsule of a numpy generator."""
    return (
        _capsule
        if near.random() < 0.98
        else near.choice((None, 3, torch.Tensor.__dict__.get("__dlpack_c_exchange_api__")))
    )


_generator = np.random.PCG64(0)
_capsule = _generator.capsule


class Subject:
    """Valid arguments of a constructor and of the methods of its object."""

    name: str

    def __init__(self, near: Near) -> None:
        self.near = near
        self.arguments: Arguments = ()
        self.object: Any = None
        """Return the object whose methods are called."""

    def methods(self) -> dict[str, Callable[[], Arguments]]:
        return {}


class Columns(Subject):
    name = "Columns"

    def __init__(self, near: Near) -> None:
        super().__init__(near)
        self.rows, self.lead = near.randrange(1, 5), near.randrange(2)
        shapes = ((), (3,), (2, 2))[: near.randrange(1, 4)]
        ones = (1,) * self.lead
        self.like = [
            torch.zeros(shape, dtype=near.choice((torch.float32, torch.int64, torch.bool))) for shape in shapes
        ]
        arrays = [torch.zeros((self.rows, *ones, *each.shape), dtype=each.dtype) for each in self.like]
        self.arguments = (arrays, [near.random() < 0.5 for _ in arrays], self.lead)

    def methods(self) -> dict[str, Callable[[], Arguments]]:
        def write() -> Arguments:
            row, which = self.near.randrange(self.rows), list(range(len(self.like)))
            if self.near.random() < 0.5:
                return row, tuple(self.like), None
            self.near.shuffle(which)
            return row, tuple(self.like[i] for i in which), tuple(which)

        return {"write": write, "have_moved": tuple}


class Counters(Subject):
    name = "Counters"

    def __init__(self, near: Near, envs: int | None = None) -> None:
        super().__init__(near)
        self.envs = near.randrange(1, 4) if envs is None else envs
        window = near.randrange(1, 4)
        open_, ring = torch.zeros(3, self.envs).double(), torch.zeros(window + 1, 6).double()
        episodes = (open_, ring, torch.tensor([near.choice((0, 7)), near.choice((7, 2**53 - 2))]), [2], [5], [6])
        moments = [(torch.zeros(()).double(), torch.zeros(3).double(), torch.zeros(3).double(), 1)]
        self.arguments = (threading.RLock(), 5, self.envs, (3, 4), near.choice((None, episodes)), moments)

    def methods(self) -> dict[str, Callable[[], Arguments]]:
        near = self.near

        def count() -> Arguments:
            steps, spare, chosen = near.randrange(1, 4), near.randrange(3), None
            if near.random() < 0.3:
                chosen = ints(near, near.randrange(self.envs + 1), self.envs)
            lead = (steps + spare, self.envs if chosen is None else len(chosen))
            rows = torch.rand(*lead, 3, generator=_random(near)).to(near.choice(DTYPES[:-1]))
            first = torch.zeros(*lead, 2, 2, dtype=torch.uint8)
            arrays = (near.choice((None, first)), rows, torch.zeros(lead), flags(near, *lead), flags(near, *lead))
            resetting = near.choice((None, flags(near, lead[1])))
            return arrays, spare, steps, chosen, resetting, near.choice((None, lambda: None))

        return {"measure": lambda: ([near.choice((None, torch.rand(self.envs).double())), None],), "count": count}


class Flattener(Subject):
    name = "Flattener"

    def __init__(self, near: Near) -> None:
        super().__init__(near)
        self.arguments = ({"obs": {"a": None, "b": {"0": None, "1": None}}, "reward": None}, {"note": None})

    def methods(self) -> dict[str, Callable[[], Arguments]]:
        return {"flatten": lambda: (({"a": 1, "b": (2, 3)}, 4), {"note": 5})}


class Gather(Subject):
    name = "Gather"

    def __init__(self, near: Near) -> None:
        super().__init__(near)
        self.items = near.randrange(1, 8)
        self.like = [
            torch.zeros(self.items, 3),
            torch.zeros(self.items, dtype=torch.int64),
            torch.zeros(self.items, 2, 5),
        ]
        self.arguments = (self.like, [1, 0, 2], self.items)

    def methods(self) -> dict[str, Callable[[], Arguments]]:
        def take() -> Arguments:
            count = self.near.randrange(6)
            padded = self.near.random() < 0.5
            start = self.near.randrange(count + 1)
            return ints(self.near, count, self.items, -1 if padded else 0), start, count, padded

        def take_into() -> Arguments:
            index, start, stop, padded = take()
            return (
                index,
                start,
                stop,
                [torch.zeros(stop - start, *a.shape[1:], dtype=a.dtype) for a in self.like],
                padded,
            )

        return {"take": take, "take_into": take_into}


class ProcessLock(Subject):
    name = "ProcessLock"

    def __init__(self, near: Near) -> None:
        super().__init__(near)
        self.arguments = (torch.zeros(getattr(_native, "LOCK_BYTES", 128), dtype=torch.uint8), True, lambda: None, 0.01)

    def methods(self) -> dict[str, Callable[[], Arguments]]:
        return {"__enter__": tuple, "__exit__": lambda: (None, None, None), "within": lambda: (0.01,)}


class Within(Subject):
    name = "Within"

    def __init__(self, near: Near) -> None:
        super().__init__(near)
        lock = ProcessLock(near)
        seconds = near.choice((0.01, 0, -1.0, *FLOATS))
        self.make = lambda: _native.ProcessLock(*lock.arguments).within(seconds)

    def methods(self) -> dict[str, Callable[[], Arguments]]:
        return {"__enter__": tuple, "__exit__": lambda: (None, None, None)}


class GuardedLock(Subject):
    name = "GuardedLock"

    def __init__(self, near: Near) -> None:
        super().__init__(near)
        self.arguments = (threading.RLock(), lambda: None)

    def methods(self) -> dict[str, Callable[[], Arguments]]:
        return {"__enter__": tuple, "__exit__": lambda: (None, None, None)}


class PriorityTree(Subject):
    name = "PriorityTree"

    def __init__(self, near: Near) -> None:
        super().__init__(near)
        self.leaves = near.choice((1, 7, 8, 9, 64, 65, 513))
        memory = tuple(torch.zeros(size, dtype=torch.float64) for size in _native.PriorityTree.sizes(self.leaves))
        memory[0][: self.leaves] = torch.rand(self.leaves, dtype=torch.float64)
        self.arguments = (memory, self.leaves)

    def methods(self) -> dict[str, Callable[[], Arguments]]:
        near = self.near

        def some(lowest: int = 0) -> torch.Tensor:
            return ints(near, near.choice((0, 1, 5, 300)), self.leaves, lowest)

        def update() -> Arguments:
            index = some(-1)
            return index, torch.rand(len(index), dtype=near.choice((torch.float32, torch.float64))), 0.6, 1e-6, [1.0]

        def put() -> Arguments:
            index = some()
            return index, near.choice((0.5, torch.rand(len(index), dtype=torch.float64)))

        def changed_slots() -> Any:
            return RingMemory(near).ring_with_steps().changed_slots

        return {
            "set": put,
            "get": lambda: (some(),),
            "draw": lambda: (near.randrange(600), bits(near)),
            "draw_weighted": lambda: (near.randrange(600), bits(near), 0.4, near.random() < 0.5),
            "update": update,
            "set_written_slots": lambda: (changed_slots(), 1.0),
            "total": tuple,
            "smallest": tuple,
            "rebuild": tuple,
            "deviation": tuple,
            "sizes": lambda: (self.leaves,),
        }


class RingMemory(Subject):
    name = "RingMemory"

    def __init__(self, near: Near) -> None:
        super().__init__(near)
        self.slots, self.envs = near.randrange(2, 9), near.randrange(1, 4)
        self.single = self.envs == 1 and near.random() < 0.5
        self.k = near.choice((0, 1, 4))
        self.stores_next_obs = near.random() < 0.2
        self.durable = near.random() < 0.3
        lead = (self.slots, self.envs)
        frame = torch.zeros(*lead, 2, 2, dtype=torch.uint8)
        self.columns = [frame, torch.zeros(*lead, 3), torch.zeros(lead, dtype=torch.float32),
                        torch.zeros(lead, dtype=torch.bool), torch.zeros(lead, dtype=torch.bool)]  # fmt: skip
        self.stacks: list[Any] = [
            (self.k, near.randrange(3), near.random() < 0.5) if self.k else None,
            None,
            None,
            None,
            None,
        ]
        self.nexts = [frame.clone(), torch.zeros(*lead, 3)] if self.stores_next_obs else []
        sizes = {"kind": (lead, torch.uint8), "first": (lead, torch.bool)} | {
            name: ((self.envs,), torch.bool if name in ("open", "resetting") else torch.int64)
            for name in ("head", "open", "resetting", "count", "floor")
        }
        self.state = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in sizes.items()}
        self.journal = torch.zeros(self.envs, dtype=torch.int64) if self.durable else None
        self.checksums = torch.zeros(*lead, 2, dtype=torch.int64) if self.durable else None
        self.rewritable = near.choice(([], [2, 4]))
        rewrite_journal = torch.zeros(2, dtype=torch.int64) if self.durable and self.rewritable else None
        rewrite_checksums = torch.zeros(lead, dtype=torch.int64) if self.durable and self.rewritable else None
        state = {
            **self.state, "journal": self.journal, "row_checksums": self.checksums,
            "rewrite_journal": rewrite_journal, "rewrite_checksums": rewrite_checksums,
        }  # fmt: skip
        self.last = (self.slots, near.random() < 0.3, near.random() < 0.3, self.single, 2, 3, 4)
        before = (self.columns, self.stacks, [0, 1], self.nexts, self.rewritable)
        self.arguments = (*before, state, *self.last)

    def frame_shape(self) -> tuple[int, ...]:
        if not self.k:
            return (2, 2)
        shape = [2, 2]
        shape.insert(self.stacks[0][1], self.k)
        return tuple(shape)

    def ring_with_steps(self) -> Any:
        """Return a ring with some steps."""
        ring = _native.RingMemory(*self.arguments)
        ring.track_changes(True)
        for _ in range(self.near.randrange(12)):
            ring.write(*self.step())
        if self.near.random() < 0.1:  # memory written by something else
            self.state["kind"].random_(0, 5, generator=_random(self.near))
            self.state["head"].fill_(self.near.choice((0, -1, 2**62, -(2**63), 2**63 - 1)))
            self.state["count"].fill_(self.near.choice((0, 5, 2**62)))
        return ring

    make = ring_with_steps

    def step(self) -> Arguments:
        near = self.near
        steps = near.choice((None, 1, 3))
        chosen = None
        if near.random() < 0.3:
            chosen = ints(near, 1 if self.single else near.randrange(self.envs + 1), self.envs)
        envs = self.envs if chosen is None else len(chosen)
        lead = (() if steps is None else (steps,)) + (() if self.single else (envs,))
        obs = (
            torch.zeros(*lead, *self.frame_shape(), dtype=torch.uint8),
            torch.rand(*lead, 3, generator=_random(near)),
        )
        values = (*obs, torch.zeros(lead), flags(near, *lead), flags(near, *lead))
        nexts = (
            torch.zeros(*lead, *self.frame_shape(), dtype=torch.uint8),
            torch.rand(*lead, 3, generator=_random(near)),
        )
        return values, nexts, chosen, steps or 1, steps is not None, near.choice((None, lambda: None))

    def methods(self) -> dict[str, Callable[[], Arguments]]:
        near, flat = self.near, self.slots * self.envs

        def rows(lowest: int = 0) -> torch.Tensor:
            return ints(near, near.randrange(7), flat, lowest)

        def stack() -> Arguments:
            slots, leaf = rows(-1), near.randrange(5)
            column = self.columns[leaf]
            shape = self.frame_shape() if leaf == 0 else column.shape[2:]
            return slots, leaf, torch.zeros(len(slots), *shape, dtype=column.dtype)

        def holds() -> Arguments:
            slots = rows()
            return slots, ints(near, len(slots), 30)

        def rewrite() -> Arguments:
            slots = rows(-1)
            values = (torch.rand(len(slots)), near.choice((None, flags(near, len(slots)))))
            return slots, values if self.rewritable else ()

        def find_damaged() -> Arguments:
            return (
                ints(near, self.envs, 9),
                ints(near, self.envs, 9),
                torch.zeros(self.slots, self.envs, dtype=torch.bool),
            )

        return {
            "write": self.step,
            "attach_counters": lambda: (_native.Counters(*Counters(near, self.envs).arguments),),
            "recompute_checksums": tuple,
            "find_damaged": find_damaged,
            "fetch": lambda: (rows(-1),),
            "write_behind": lambda: (near.choice((-1, 10**6)), 0, 4096),
            "continuity_counts": tuple,
            "track_changes": lambda: (True,),
            "watch_cuts": lambda: (True,),
            "is_valid": tuple,
            "stored": tuple,
            "draw": lambda: (near.randrange(40), bits(near)),
            "ids": lambda: (rows(-1),),
            "count_following": lambda: (rows(-1),),
            "count_preceding": lambda: (rows(-1),),
            "locate": lambda: (ints(near, near.randrange(6), 20),),
            "holds": holds,
            "stack": stack,
            "rewrite": rewrite,
            "finish_rewrite": tuple,
            "find_torn": lambda: (torch.zeros(self.slots, self.envs, dtype=torch.bool),),
        }


class PlanReader(Subject):
    name = "PlanReader"

    def __init__(self, near: Near) -> None:
        super().__init__(near)
        self.ring = RingMemory(near)
        self.memory = self.ring.ring_with_steps()
        self.flat = self.ring.slots * self.ring.envs
        self.arguments = near.choice((self.rows, self.sequences))()

    def rows(self) -> Arguments:
        """Return a read plan of transitions or n-step sums, with or without offsets."""
        n = self.near.choice((0, 1, min(3, self.ring.slots)))
        groups = [(0, False, False, None), (1, False, False, None), (2, False, False, None)]
        groups += [(4, False, False, None)] if n else []
        reads = [(0, 0), (1, 0), (2, 3 if n else 0), (3, 1), (4, 1), (0, 2), (1, 2)]
        before = after = max(n - 1, 0)
        if self.near.random() < 0.5:
            groups += [(0, False, True, [-1, 0, 2]), (0, True, True, [0, 1]), (2, True, False, [-3, 0])]
            reads += [(3, len(groups) - 3), (1, len(groups) - 2), (0, len(groups) - 1)]
            before = after = min(max(n - 1, 3), self.ring.slots - 1)
        return (self.memory, reads, groups, self.near.randrange(2), False, False, before, after, n, 0.9)

    def sequences(self) -> Arguments:
        groups = [(0, False, True, []), (2, False, False, []), (3, False, False, None)]
        reads = [(0, 0), (1, 0), (3, 0), (4, 0), (0, 1), (1, 1), (2, 2)]
        flags = self.near.random() < 0.5, self.near.random() < 0.5
        return (self.memory, reads, groups, 2, *flags, self.near.randrange(3), self.near.randrange(4), 0, 0.0)

    def methods(self) -> dict[str, Callable[[], Arguments]]:
        def rows() -> torch.Tensor:
            return ints(self.near, self.near.randrange(7), self.flat)

        def fill() -> Arguments:
            slots = rows()
            reader = self.near.choice((self.object, _native.PlanReader(*PlanReader(self.near).arguments)))
            return attempt(reader.reserve, (len(slots),)), slots

        return {
            "read": lambda: (rows(),),
            "reserve": lambda: (self.near.randrange(9),),
            "fill": fill,
            "sample": lambda: (self.near.randrange(40), bits(self.near)),
        }


class SequenceIndex(Subject):
    name = "SequenceIndex"

    def __init__(self, near: Near) -> None:
        super().__init__(near)
        self.rows, self.envs = near.randrange(1, 7), near.randrange(1, 4)
        steps, length = near.randrange(self.rows + 1), near.choice((0, 1, 3))
        mask = flags(near, steps, self.envs) if near.random() < 0.5 else None
        self.steps = steps
        self.arguments = (steps, flags(near, self.rows, self.envs), flags(near, self.rows, self.envs), mask,
                          flags(near, self.envs), length, 1, near.random() < 0.5, near.random() < 0.5)  # fmt: skip

    def methods(self) -> dict[str, Callable[[], Arguments]]:
        return {"__len__": tuple}


class SequenceGather(Subject):
    name = "SequenceGather"

    def __init__(self, near: Near) -> None:
        super().__init__(near)
        source = SequenceIndex(near)
        index = _native.SequenceIndex(*source.arguments)
        self.sequences = len(index)
        lead = (source.rows, source.envs)
        layout = near.choice(("packed", "time_first", "batch_first"))
        self.arguments = (index, max(index.longest, 1), layout, [torch.zeros(*lead, 3), torch.zeros(lead)], [1, 0],
                          [torch.zeros(*lead, 2)], [1])  # fmt: skip

    def methods(self) -> dict[str, Callable[[], Arguments]]:
        def take() -> Arguments:
            count = self.near.randrange(1, 5)
            return ints(self.near, count, self.sequences), self.near.randrange(count), count

        return {"take": take}


SUBJECTS: tuple[type[Subject], ...] = (
    Columns, Counters, Flattener, Gather, GuardedLock, ProcessLock, Within, PriorityTree, RingMemory, PlanReader,
    SequenceIndex, SequenceGather,
)  # fmt: skip


def rollout(near: Near, numbers: int, *settings: Any) -> Arguments:
    """Return valid arguments of an estimator that takes `numbers` tensors of numbers."""
    shape = (near.choice((0, 1, 2, 9)), *near.choice(((), (3,), (17,), (2, 4))))
    dtype = near.choice((torch.float32, torch.float64))
    tensors = [torch.rand(shape, dtype=dtype) for _ in range(numbers)]
    mask = flags(near, *shape) if near.random() < 0.5 else None
    return (*tensors, flags(near, *shape), flags(near, *shape), mask, *settings)


FUNCTIONS: dict[str, Callable[[Near], Arguments]] = {
    "Batch": lambda _: (),  # this class and the next one are returned by methods only
    "ChangedSlots": lambda _: (),
    "complete": lambda _: (lambda: None,),
    "set_torch": lambda _: (torch.Tensor, torch.nn.Parameter),
    "set_numpy": lambda _: (np.ndarray, [np.zeros(3), np.zeros((2, 2), np.int64)]),
    "reads_numpy": lambda _: (),
    "exchange": lambda _: (),
    "set_exchange": lambda near: (near.random() < 0.5,),
    "set_avx2": lambda near: (near.random() < 0.5,),
    "crc32": lambda near: (bytes(near.randrange(200)), 0),
    "shuffle": lambda near: (ints(near, near.randrange(6), 9), bits(near)),
    "permutation": lambda near: (near.randrange(50), bits(near)),
    "gae": lambda near: rollout(near, 3, 0.9, 0.8),
    "lambda_return": lambda near: rollout(near, 2, 0.9, 0.8),
    "n_step_return": lambda near: rollout(near, 2, 0.9, near.randrange(1, 5)),
    "vtrace": lambda near: rollout(near, 4, 0.9, 0.8, 1.0, 1.0),
}


def covered() -> set[str]:
    """Return the names of all functions that trials call, in the form of `core_names`."""
    near = Near(0)
    methods = {f"{kind.name}.{name}" for kind in SUBJECTS for name in kind(near).methods()}
    return set(FUNCTIONS) | {kind.name for kind in SUBJECTS} | methods


def core_names() -> set[str]:
    """Return the names of all functions, constructors and methods of the core."""
    special = ("__enter__", "__exit__", "__len__")
    names: set[str] = set()
    for name, value in vars(_native).items():
        if isinstance(value, type):
            methods = {m for m, f in vars(value).items() if callable(f) and (m in special or not m.startswith("__"))}
            if methods or "__init__" in vars(value):
                names |= {name, *(f"{name}.{method}" for method in methods)}
        elif callable(value) and not name.startswith("__"):
            names.add(name)
    return names - set(NOT_CALLED)


def _random(near: Near) -> torch.Generator:
    return torch.Generator(device="cpu").manual_seed(near.randrange(2**31))


def trial(near: Near) -> Iterator[None]:
    """Run one trial; yield after each call."""
    if near.random() < 0.3:
        name = near.choice([name for name in FUNCTIONS if hasattr(_native, name)])
        yield attempt(getattr(_native, name), near.arguments(FUNCTIONS[name](near)))
        _native.set_torch(torch.Tensor, torch.nn.Parameter)
        _native.set_exchange(True)
        _native.set_avx2(True)
        return
    kind = near.choice([kind for kind in SUBJECTS if hasattr(_native, kind.name)])
    subject = kind(near)
    make = getattr(subject, "make", None) or (lambda: getattr(_native, kind.name)(*subject.arguments))
    made = None
    if subject.arguments and near.random() < 0.3:
        made = attempt(getattr(_native, kind.name), near.arguments(subject.arguments))
        yield
    subject.object = made if made is not None else make()
    methods = subject.methods()
    for _ in range(near.randrange(8)):
        name = near.choice(list(methods))
        yield touch(attempt(getattr(subject.object, name), near.arguments(methods[name]())))  # pyright: ignore


def attempt(call: Callable[..., Any], arguments: Arguments) -> Any:
    """Return the result of a call, None for an exception. A SystemError is a bug of the binding."""
    try:
        return call(*arguments)
    except SystemError:
        raise
    except Exception:
        return None


def touch(result: Any) -> None:
    """Read every byte of a result."""
    for each in result if isinstance(result, list | tuple) else (result,):
        if isinstance(each, torch.Tensor) and not each.is_meta:
            each.clone()


def limit_memory() -> None:
    """Limit memory to 2 GiB; sanitizers have their own limit."""
    if not any(name in os.environ for name in ("ASAN_OPTIONS", "TSAN_OPTIONS")):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), resource.RLIM_INFINITY))


def run(seed: int, first: int, count: int) -> int:
    """Run trials; return the number of calls."""
    limit_memory()
    calls = 0
    with open(os.environ["RELIVE_NATIVE_TRIAL"], "r+b") as file, mmap.mmap(file.fileno(), 8) as place:
        for number in range(first, first + count):
            place[:8] = number.to_bytes(8, "little")
            if number % 1000 == 0 or number == first:
                faulthandler.dump_traceback_later(60, exit=True)
            calls += sum(1 for _ in trial(Near(f"{seed}/{number}")))
    faulthandler.cancel_dump_traceback_later()
    return calls


if __name__ == "__main__":
    faulthandler.enable()
    sys.stdout.write(f"{run(*map(int, sys.argv[1:]))}\n")
