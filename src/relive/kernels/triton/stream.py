"""The random stream of a buffer whose draws are made by Triton's kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from relive.errors import require
from relive.kernels.triton.philox import CELLS, uniform_numbers
from relive.rng import Randomness

if TYPE_CHECKING:
    from relive.checkpoint.snapshot import SnapshotReader


class DeviceStream(Randomness):
    """Draws by a counter on the device (Philox), keyed by the seed.

    The same seed gives the same draws on every device, and under Triton's interpreter. Shuffling, which is torch's, is
    the device's own.
    """

    def __init__(self, seed: int | None, device: torch.device) -> None:
        super().__init__(seed)
        self.device = device
        self.numbers = torch.zeros(1 + CELLS, dtype=torch.int64, device=device)
        """The key, and how often numbers were drawn at each cell of places; see `philox`."""
        self._begin()

    def _begin(self) -> None:
        self.numbers.zero_()
        self.numbers[0] = self.seed()

    def uniform(self, count: int, device: torch.device) -> torch.Tensor:
        if device != self.device:
            return super().uniform(count, device)
        return uniform_numbers(self.numbers, count)

    def state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        values, arrays = super().state()
        return values, {**arrays, "philox": self.numbers}

    def load_state(self, saved: SnapshotReader) -> None:
        """Continue where a stream was, also on another device; a stream of another kind begins anew."""
        super().load_state(saved)
        if saved.form("philox") is None:
            self._begin()
            return
        # In an earlier form there was one counter for all places.
        is_old = saved.form("philox") == (torch.int64, (2,))
        found = saved.shaped("philox", (2 if is_old else 1 + CELLS,), torch.int64)
        if bool((found < 0).any()):
            raise saved.at("philox", found.tolist()).error("a key and numbers of draws, all at least 0")
        self.numbers[0].copy_(found[0])
        self.numbers[1:].copy_(found[1:])

    def snapshot(self) -> Any:
        return super().snapshot(), self.numbers.clone()

    def restore(self, snapshot: Any) -> None:
        host, numbers = snapshot
        super().restore(host)
        self.numbers.copy_(numbers)

    def check(self) -> None:
        super().check()
        least = int(self.numbers.min())
        require(least >= 0, "generator", "a key and numbers of draws, all at least 0", least)
