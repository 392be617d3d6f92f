"""If Triton is too old or fails, torch ops are used on the device, after one warning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

import relive as rl
from relive import kernels
from tests.kernels.compiling.two_gpus import Gpus, patch_torch


@pytest.fixture(autouse=True)
def _clear_cache() -> Iterator[None]:
    """Clear the cached results of whether Triton works on a device."""
    kernels._triton_works_on.cache_clear()
    yield
    kernels._triton_works_on.cache_clear()


def query_backend() -> tuple[list[str], list[str]]:
    """Return the backend of a GPU, queried twice, and the warnings."""
    with patch_torch(Gpus()) as mode, mode, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tensors = [torch.zeros(3, device="cuda:1")]
        backends = [kernels.choose_backend(tensors), kernels.choose_backend(tensors)]
    return backends, [str(warning.message) for warning in caught]


def replace_triton(monkeypatch: pytest.MonkeyPatch, triton: ModuleType | None) -> None:
    """Remove Triton from the imported modules; `import triton` then returns `triton`, or fails for None."""
    for name in list(sys.modules):
        if name.split(".")[0] == "triton" or name.startswith("relive.kernels.triton."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", triton)
    if triton is not None:
        monkeypatch.setitem(sys.modules, "triton.language", triton.language)
    monkeypatch.setattr(kernels, "_has_triton", lambda: True)


def make_old_triton() -> ModuleType:
    """Return a module like Triton 3.3, which has the language but no `knobs`."""
    module = ModuleType("triton")
    module.__dict__.update({"__version__": "3.3.1", "language": ModuleType("triton.language")})
    return module


def test_torch_ops_replace_an_older_triton_with_one_warning_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_triton(monkeypatch, make_old_triton())
    backends, messages = query_backend()
    assert backends == ["torch", "torch"]
    (message,) = messages
    assert (
        "expected Triton 3.4 or later that compiles, got Triton 3.3.1 (ImportError: cannot import name 'knobs'"
        in message
    )
    assert "Torch ops serve instead" in message


def test_torch_ops_replace_a_triton_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_triton(monkeypatch, None)
    backends, messages = query_backend()
    assert backends == ["torch", "torch"]
    assert len(messages) == 1
    assert "Triton that cannot be imported" in messages[0]


def test_torch_ops_replace_a_triton_that_fails_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> None:
        raise FileNotFoundError("Failed to find C compiler.\nPlease specify via CC environment variable.")

    monkeypatch.setattr(kernels, "_has_triton", lambda: True)
    monkeypatch.setattr(kernels, "_launch_probe", fail)
    backends, messages = query_backend()
    assert backends == ["torch", "torch"]
    assert len(messages) == 1
    assert "(FileNotFoundError: Please specify via CC environment variable.)" in messages[0]


def test_a_missing_triton_gives_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_has_triton", lambda: False)
    assert query_backend() == (["torch", "torch"], [])


def test_a_working_triton_is_used_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device] = []
    monkeypatch.setattr(kernels, "_has_triton", lambda: True)
    monkeypatch.setattr(kernels, "_launch_probe", devices.append)
    assert query_backend() == (["triton", "triton"], [])
    assert devices == [torch.device("cuda:1")]


def test_the_host_needs_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_triton(monkeypatch, make_old_triton())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replay = rl.ReplayBuffer(8, 2, 1, seed=0)
    assert type(replay.storage).__name__ != "TritonBackend"
