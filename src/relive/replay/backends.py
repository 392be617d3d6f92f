"""Which store serves a memory: asked once, when a buffer is made."""

from __future__ import annotations

from typing import Any

from relive import kernels
from relive.errors import SchemaError, explain
from relive.replay.bridged_store import BridgedStore
from relive.replay.native_store import NativeStore
from relive.replay.row_memory import RowMemory
from relive.replay.torch_store import TorchStore

_STORES: dict[str, Any] = {"native": NativeStore, "bridged": BridgedStore, "torch": TorchStore}


def _store_of(serving: str) -> Any:
    if serving == "triton":
        from relive.replay.triton_store import TritonStore  # noqa: PLC0415 (which needs Triton)

        return TritonStore
    return _STORES[serving]


def store_over(memory: RowMemory) -> Any:
    """The `ReplayStore` over a memory; a `DurableStore` where the memory outlives this process."""
    serving = kernels.serving(memory.tensors, memory.schema.deepest_stack)
    if memory.allocator.persistent and serving in ("torch", "triton"):
        remedy = "Declare fewer leaves, axes or frames, or keep the buffer in this process's own memory."
        got = f"{len(memory.leaves)} leaves that it cannot"
        expected = "fields that the native core can write, as shared and disk memory need"
        raise SchemaError(explain("device", expected, got, remedy))
    return _store_of(serving)(memory)
