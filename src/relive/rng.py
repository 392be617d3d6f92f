"""Random number streams of buffers: seeded, saved with their buffer, and independent of global generators."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from relive.errors import SchemaError, explain, verify

if TYPE_CHECKING:
    from relive.storage.codec import JsonNode, SnapshotReader

_MAX_STATE_BYTES = 1 << 20
"""Maximum bytes of a saved state."""
_MAX_VALUES = {"has_uint32": 1, "uinteger": 2**32 - 1}
"""Maximum values of the two numbers that describe numpy's buffered 32-bit word."""
_DEVICE_PATTERN = re.compile(r"[a-z]{1,32}(:[0-9]{1,3})?")


class Randomness:
    """One stream of random numbers. Without a seed, the operating system provides one.

    A seed reproduces draws on the same kind of device with the same backend; the native core, torch ops on the CPU and
    other devices use the stream in different orders.
    """

    def __init__(self, seed: int | None = None) -> None:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0):
            raise SchemaError(
                explain("seed", "a non-negative int or None", repr(seed), "Pass an int of at least 0, or None.")
            )
        self.bits = np.random.PCG64DXSM(seed)
        """Bit generator of all draws on the host, including those of the native core."""
        self.capsule = self.bits.capsule
        """Capsule of `bits` for the native core."""
        self._devices: dict[torch.device, torch.Generator] = {}
        self._slice_starts: torch.Tensor | None = None
        """Starts of the slices of the last call of `uniform_in_slices`."""

    def state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the position in the stream, as values and arrays of a `State`."""
        bits, devices = self._read_generator_states()
        values = {
            # The integers are saved as text, because other JSON readers would round integers of 128 bits.
            "state": str(bits["state"]["state"]),
            "inc": str(bits["state"]["inc"]),
            "has_uint32": int(bits["has_uint32"]),
            "uinteger": int(bits["uinteger"]),
            "devices": [str(device) for device in devices],
        }
        return values, {f"device{i}": state for i, state in enumerate(devices.values())}

    def load_state(self, saved: SnapshotReader) -> None:
        """Restore a saved position. On another device than before, the stream of that device starts anew."""
        node, arrays = saved.values, saved.read_all_arrays(_MAX_STATE_BYTES)
        bits: Any = {
            "bit_generator": "PCG64DXSM",
            "state": {name: _read_big_integer(node.entry(name)) for name in ("state", "inc")},
        }
        bits |= {name: node.entry(name).integer(0, max_value) for name, max_value in _MAX_VALUES.items()}
        names = node.entry("devices")
        device_names = [] if saved.is_moved else [name.text(_DEVICE_PATTERN) for name in names.items(64)]
        try:
            states = {torch.device(name): arrays.get(f"device{i}") for i, name in enumerate(device_names)}
            if any(state is None or device.type in ("cpu", "meta") for device, state in states.items()):
                raise names.error("accelerators, each with a generator state")
            self._set_generator_states(bits, states)  # pyright: ignore[reportArgumentType] (none of them is None)
        except (RuntimeError, TypeError) as error:
            # The machine may lack the device, or the saved state may be invalid for its generator.
            raise names.error(f"generator states ({error})") from None

    def snapshot(self) -> Any:
        """Return the states of the random generators, for `restore`."""
        return self._read_generator_states()

    def restore(self, snapshot: Any) -> None:
        """Restore a position: the draws that followed its snapshot are repeated."""
        self._set_generator_states(*snapshot)

    def _read_generator_states(self) -> tuple[Any, dict[torch.device, torch.Tensor]]:
        return self.bits.state, {device: generator.get_state() for device, generator in self._devices.items()}

    def _set_generator_states(self, host_state: Any, device_states: dict[torch.device, torch.Tensor]) -> None:
        self._devices = {device: self.generator(device) for device in device_states}
        self.bits.state = host_state
        for device, state in device_states.items():
            self._devices[device].set_state(state)

    def check(self) -> None:
        """Verify that all draws use one stream."""
        state = self.bits.state
        verify(self.capsule is self.bits.capsule, "generator", "one for native and other draws", "two")
        # With an even increment the generator would repeat itself too soon.
        verify(state["state"]["inc"] % 2, "generator", "an odd increment", state["state"]["inc"])
        for device, generator in self._devices.items():
            verify(generator.device == device, "generator", f"one of {device}", f"one of {generator.device}")

    def draw_seed(self) -> int:
        """Draw a seed for another stream."""
        return int(self.bits.random_raw()) >> 1

    def integers_below(self, bound: torch.Tensor, count: int) -> torch.Tensor:
        """Draw `count` uniform int64 in [0, bound), on the device of `bound`, without synchronising."""
        return (self.uniform(count, bound.device) * bound).long().minimum(bound - 1)

    def integers(self, count: int, device: torch.device) -> torch.Tensor:
        """Draw `count` uniform int64 in [0, 2^62). Their remainders by up to 2^42 are uniform to within 2^-20."""
        if device.type == "cpu":
            return torch.from_numpy(np.random.Generator(self.bits).integers(1 << 62, size=count))
        return torch.randint(1 << 62, (count,), device=device, generator=self.generator(device))

    def uniform(self, count: int, device: torch.device) -> torch.Tensor:
        """Draw `count` float64 in [0, 1)."""
        if device.type == "cpu":
            return torch.from_numpy(np.random.Generator(self.bits).random(count))
        return torch.rand(count, dtype=torch.float64, device=device, generator=self.generator(device))

    def uniform_in_slices(self, count: int, device: torch.device) -> torch.Tensor:
        """Draw one float64 in each of `count` equal slices of (0, 1), in order."""
        width = 1 / max(count, 1)
        if self._slice_starts is None or len(self._slice_starts) != count or self._slice_starts.device != device:
            self._slice_starts = torch.linspace(2.0**-60, 1 - width, count, dtype=torch.float64, device=device)
        # The factor is slightly less than the width of a slice, so that no sum is rounded to more than 1.
        return torch.add(self._slice_starts, self.uniform(count, device), alpha=(1 - 2**-50) * width)

    def generator(self, device: torch.device) -> torch.Generator:
        if device not in self._devices:
            generator = torch.Generator(device)
            generator.manual_seed(self.draw_seed())
            self._devices[device] = generator
        return self._devices[device]


def _read_big_integer(node: JsonNode) -> int:
    """Read an integer of at most 128 bits in decimal digits."""
    digits = node.value
    is_number = isinstance(digits, str) and digits.isascii() and digits.isdigit() and len(digits) <= 39
    if not is_number or int(digits) >= 1 << 128:
        raise node.error("an integer of at most 128 bits, in decimal digits")
    return int(digits)
