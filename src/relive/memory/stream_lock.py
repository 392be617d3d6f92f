"""A lock for memory of a device where launches of one stream are in order, and those of two streams are not."""

from __future__ import annotations

from typing import Any

import torch

from relive import kernels


def stream_lock(device: torch.device) -> Any:
    """A re-entrant lock: what its holder launches comes after what earlier holders have launched.

    A holder on another stream than the last one lets its stream wait for that one, on the device; the host does not
    wait. While a graph is captured nothing of other streams may be waited for: `torch.cuda.graph` has waited before.
    """
    return kernels.guarded_lock(_Follower(device))


class _Follower:
    """Lets the stream of a new holder wait for that of the last one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: Any = None
        """The stream of the last holder."""

    def __call__(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        if stream == self._last:
            return
        with torch.cuda.device(self._device):  # torch asks the current device
            if torch.cuda.is_current_stream_capturing():
                return
        if self._last is not None:
            stream.wait_stream(self._last)
        self._last = stream
