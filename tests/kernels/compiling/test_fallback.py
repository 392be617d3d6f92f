"""Where Triton is too old or fails, torch ops serve the device, and one warning says so."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

import relive as rl
from relive import kernels
from tests.kernels.compiling.two_gpus import Gpus, torch_with


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    """Whether Triton serves a device is remembered by the process."""
    kernels._triton_works_on.cache_clear()
    yield
    kernels._triton_works_on.cache_clear()


def served() -> tuple[list[str], list[str]]:
    """The kernels that serve a GPU, asked twice, and the warnings."""
    with torch_with(Gpus()) as mode, mode, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tensors = [torch.zeros(3, device="cuda:1")]
        found = [kernels.serving(tensors), kernels.serving(tensors)]
    return found, [str(warning.message) for warning in caught]


def without_modules(monkeypatch: pytest.MonkeyPatch, triton: ModuleType | None) -> None:
    """Nothing of Triton is imported yet, and `import triton` gives this, or fails."""
    for name in list(sys.modules):
        if name.split(".")[0] == "triton" or name.startswith("relive.kernels.triton."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", triton)
    if triton is not None:
        monkeypatch.setitem(sys.modules, "triton.language", triton.language)
    monkeypatch.setattr(kernels, "_has_triton", lambda: True)


def old_triton() -> ModuleType:
    """As Triton 3.3 is seen by our modules: it has the language and no `knobs`."""
    module = ModuleType("triton")
    module.__dict__.update({"__version__": "3.3.1", "language": ModuleType("triton.language")})
    return module


def test_an_older_triton_steps_aside_with_one_warning_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    without_modules(monkeypatch, old_triton())
    found, told = served()
    assert found == ["torch", "torch"]
    (message,) = told
    assert (
        "expected Triton 3.4 or later that compiles, got Triton 3.3.1 (ImportError: cannot import name 'knobs'"
        in message
    )
    assert "Torch ops serve instead" in message


def test_a_triton_that_cannot_be_imported_steps_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    without_modules(monkeypatch, None)
    found, told = served()
    assert found == ["torch", "torch"]
    assert len(told) == 1
    assert "Triton that cannot be imported" in told[0]


def test_a_triton_that_fails_to_compile_steps_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> None:
        raise FileNotFoundError("Failed to find C compiler.\nPlease specify via CC environment variable.")

    monkeypatch.setattr(kernels, "_has_triton", lambda: True)
    monkeypatch.setattr(kernels, "_probe", fail)
    found, told = served()
    assert found == ["torch", "torch"]
    assert len(told) == 1
    assert "(FileNotFoundError: Please specify via CC environment variable.)" in told[0]


def test_no_triton_is_no_reason_to_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_has_triton", lambda: False)
    assert served() == (["torch", "torch"], [])


def test_a_triton_that_works_serves_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(kernels, "_has_triton", lambda: True)
    monkeypatch.setattr(kernels, "_probe", asked.append)
    assert served() == (["triton", "triton"], [])
    assert asked == [torch.device("cuda:1")]


def test_the_host_needs_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    without_modules(monkeypatch, old_triton())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replay = rl.ReplayBuffer(8, 2, 1, seed=0)
    assert type(replay.storage).__name__ != "TritonBackend"
