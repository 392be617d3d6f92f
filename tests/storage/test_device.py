"""The argument `device` of buffers: torch devices and `Memory`."""

from __future__ import annotations

import pytest
import torch

from relive.storage import Memory


def test_cuda_names_the_device_that_is_current_when_a_buffer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    current = 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    memory = Memory.of("cuda")
    current = 0
    assert memory.device == torch.device("cuda:1")
    assert Memory.of("cuda:3").device == torch.device("cuda:3")


def test_without_a_device_it_stays_the_name_that_torch_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Memory.of("cuda").device == torch.device("cuda")
