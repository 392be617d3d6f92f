"""AgileRL's `Sampler`, whose `sample` draws from every kind of buffer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from relive.compat.agilerl.components import data, replay_buffer
from relive.compat.agilerl.rows import find_original_class
from relive.errors import explain

# Where AgileRL is installed, these are its own classes, of which relive's buffers are instances, too.
_MODULE = "components.replay_buffer"
ReplayBuffer = find_original_class(_MODULE, "ReplayBuffer", replay_buffer.ReplayBuffer)
MultiStepReplayBuffer = find_original_class(_MODULE, "MultiStepReplayBuffer", replay_buffer.MultiStepReplayBuffer)
PrioritizedReplayBuffer = find_original_class(_MODULE, "PrioritizedReplayBuffer", replay_buffer.PrioritizedReplayBuffer)
ReplayDataset = find_original_class("components.data", "ReplayDataset", data.ReplayDataset)


class Sampler:
    """Draws from `memory`, or from the buffer of `dataset` through a `dataloader` of torch.

    `sample` takes `(batch_size, return_idx)` for a plain buffer, `(batch_size, beta)` for priorities and `(idxs)` for
    n steps.
    """

    sample: Callable[..., TensorDict]
    """The `sample_…` method for the kind of memory."""

    def __init__(self, memory: Any = None, dataset: Any = None, dataloader: Any = None) -> None:
        if memory is None and None in (dataset, dataloader):
            remedy = "Pass memory=, or dataset= and dataloader= together."
            raise AssertionError(explain("Sampler", "a memory, or a dataset with its dataloader", "no memory", remedy))
        self.memory: Any = memory
        self.dataset: Any = dataset
        self.dataloader = dataloader
        draws = (
            ("PrioritizedReplayBuffer", PrioritizedReplayBuffer, self.sample_per),
            ("MultiStepReplayBuffer", MultiStepReplayBuffer, self.sample_n_step),
            ("ReplayBuffer", ReplayBuffer, self.sample_standard),
        )
        name, kind, self.sample = next((draw for draw in draws if isinstance(memory, draw[1])), draws[-1])
        self.per, self.n_step = kind is PrioritizedReplayBuffer, kind is MultiStepReplayBuffer
        self.distributed = isinstance(dataloader, DataLoader) and dataset is not None
        # The warnings below keep AgileRL's words, because AgileRL's tests match them.
        if not self.distributed:
            _warn_unless_instance(kind, memory, f"Memory is not an agilerl {name}")
            return
        self.sample = self.sample_distributed
        if isinstance(self.dataset.buffer, ReplayBuffer):
            self.dataloader = self._replace_dataloader_collate_fn(dataloader)
        _warn_unless_instance(ReplayDataset, dataset, "Dataset is not an agilerl ReplayDataset")
        _warn_unless_instance(DataLoader, self.dataloader, "Dataset is not a torch DataLoader object")

    def _replace_dataloader_collate_fn(self, dataloader: DataLoader[Any]) -> DataLoader[Any]:
        names = ("dataset", "batch_size", "num_workers", "pin_memory", "prefetch_factor", "persistent_workers")
        settings: dict[str, Any] = {name: getattr(dataloader, name) for name in names}
        if dataloader.batch_size is not None:
            settings["drop_last"] = dataloader.drop_last
        return DataLoader(**settings, collate_fn=self.tensordict_collate_fn)

    @staticmethod
    def tensordict_collate_fn(batch: Any) -> TensorDict:
        """Stack TensorDicts; a single TensorDict is returned unchanged."""
        return batch if isinstance(batch, TensorDict) else TensorDict.stack(batch)

    @classmethod
    def create_dataloader(cls, dataset: Any, batch_size: int | None = None, **kwargs: Any) -> DataLoader[Any]:
        """Make a DataLoader of `dataset` that stacks TensorDicts."""
        return DataLoader(dataset, batch_size=batch_size, **{"collate_fn": cls.tensordict_collate_fn, **kwargs})

    def sample_standard(self, batch_size: int, return_idx: bool = False) -> TensorDict:
        """Draw a batch from a plain buffer."""
        return self.memory.sample(batch_size, return_idx)

    def sample_distributed(self, batch_size: int, return_idx: bool | None = None) -> TensorDict:
        """Draw a batch from the loader; ignores `return_idx`."""
        self.dataset.batch_size = batch_size
        return next(iter(self.dataloader))

    def sample_per(self, batch_size: int, beta: float) -> TensorDict:
        """Draw a batch from a prioritized buffer."""
        return self.memory.sample(batch_size, beta=beta)

    def sample_n_step(self, idxs: torch.Tensor) -> TensorDict:
        """Read the n-step rows `idxs`."""
        return self.memory.sample_from_indices(idxs)


def _warn_unless_instance(expected_class: type, value: Any, message: str) -> None:
    """Warn if an object is not of the kind that AgileRL's trainers expect."""
    if not isinstance(value, expected_class):
        remedy = "Training continues; check that it has the methods of one."
        warnings.warn(f"{message}: got {type(value).__name__}. {remedy}", stacklevel=3)
