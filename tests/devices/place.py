"""The device of the tests in this folder, and copies of host data to it and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

import relive as rl
from benchmarks.devices import missing
from relive import kernels


class Place(NamedTuple):
    """A device, and the context in which its buffers are made and called."""

    device: torch.device
    inside: Callable[[], Any]

    def there(self, value: Any) -> Any:
        """Move tensors in any nesting to the device."""
        return moved(value, self.device)


def place(name: str) -> Place:
    """Return the device with this name; "cpu" uses torch ops, "interpreter" the CPU with Triton's interpreter."""
    if name == "interpreter":
        return Place(torch.device("cpu"), _interpreted)
    reason = missing(name)
    assert reason is None, reason
    return Place(torch.device(name), kernels.force_torch if name == "cpu" else nullcontext)


@contextmanager
def _interpreted() -> Iterator[None]:
    from tests.kernels.triton.interpreter import interpreted  # noqa: PLC0415 (needs Triton)

    with interpreted():
        yield


def moved(value: Any, device: torch.device | str) -> Any:
    """Move tensors in any nesting to another device; leave everything else."""
    if isinstance(value, torch.Tensor | TensorDictBase):
        return value.to(device)
    if isinstance(value, dict):
        return {name: moved(each, device) for name, each in value.items()}
    return type(value)(moved(each, device) for each in value) if type(value) in (tuple, list) else value


def same(a: TensorDictBase, b: TensorDictBase) -> None:
    """Check that two batches have the same fields and bits."""
    a, b = a.cpu(), b.cpu()
    assert set(a.keys(True, True)) == set(b.keys(True, True))
    for path in a.keys(True, True):
        torch.testing.assert_close(a[path], b[path], rtol=0, atol=0, equal_nan=True)


def moving(on: Place) -> Any:
    """Return a copy of relive that moves arguments to the device, and results to the host."""

    class Replay(rl.ReplayBuffer):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{"device": on.device, **options})

        def add(self, *args: Any, **fields: Any) -> None:
            super().add(*on.there(args), **on.there(fields))

        def sample(self, *args: Any, **options: Any) -> Any:
            return super().sample(*args, **options).cpu()

        def update_priority(self, index: Any, priority: Any) -> int:
            return int(super().update_priority(on.there(index), on.there(priority)))

    class Rollout(rl.RolloutBuffer):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{"device": on.device, **options})

        def add(self, *args: Any, **fields: Any) -> None:
            super().add(*on.there(args), **on.there(fields))

        def compute_advantage(self, *args: Any, **options: Any) -> None:
            super().compute_advantage(*on.there(args), **on.there(options))

        def minibatches(self, *args: Any, **options: Any) -> Any:
            yield from (batch.cpu() for batch in [*super().minibatches(*args, **options)])

        def sequences(self, *args: Any, **options: Any) -> Any:
            yield from (batch.cpu() for batch in [*super().sequences(*args, **options)])

    def gae(*args: Any, **options: Any) -> Any:
        return moved(rl.gae(*on.there(args), **on.there(options)), "cpu")

    changed = {"ReplayBuffer": Replay, "RolloutBuffer": Rollout, "gae": gae}
    return type("Relive", (), {**vars(rl), **{name: staticmethod(each) for name, each in changed.items()}})
