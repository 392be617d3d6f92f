"""The rows of one client on their way to all shards of a service."""

from __future__ import annotations

import secrets
import threading

import numpy as np
import torch

from relive.distributed.block import pack
from relive.distributed.calls import Calls
from relive.distributed.plan import Plan
from relive.distributed.stream import Stream


class Sender:
    """Sends each environment's steps to its shard; several threads may use it."""

    def __init__(self, calls: Calls, plan: Plan, max_pending: int) -> None:
        client = secrets.token_hex(16)
        self._calls, self._plan = calls, plan
        self.streams = [Stream(calls, shard, client, max_pending) for shard in range(plan.num_shards)]
        self._cut: set[int] = set()
        """Environments whose next rows start an episode."""
        self._lock = threading.RLock()

    @property
    def pending(self) -> int:
        """The number of blocks that no shard has confirmed yet."""
        return sum(stream.pending for stream in self.streams)

    @property
    def lost(self) -> int:
        """The number of rows that restarted shards have lost and that cannot be sent again."""
        return sum(stream.lost for stream in self.streams)

    def push(self, leaves: list[torch.Tensor], nexts: list[torch.Tensor], envs: torch.Tensor) -> None:
        """Send converted leaves and next observations [T, k, …] of k environments to their shards."""
        ids = envs.numpy()
        owner = self._plan.shard_of(ids)
        with self._lock:
            shards = sorted(set(owner.tolist()))
            deadline = self._calls.deadline()
            for shard in shards:
                self.streams[shard].make_room(deadline)
            for shard in shards:
                mine = torch.from_numpy(np.nonzero(owner == shard)[0])
                parts = [leaves, nexts]
                if len(mine) < len(ids):
                    parts = [[leaf[:, mine] for leaf in part] for part in parts]
                own = ids[mine.numpy()]
                cut = np.array([env for env in own.tolist() if env in self._cut], np.int64)
                self._cut.difference_update(cut.tolist())
                first = self._plan.envs(shard).start
                self.streams[shard].push(own - first, pack(self._plan.schema, *parts), cut - first)

    def cut(self, envs: torch.Tensor) -> None:
        """End the current episodes of `envs`: their next rows start new ones."""
        with self._lock:
            self._cut.update(envs.tolist())

    def send_waiting(self, deadline: float) -> None:
        """Send waiting blocks to every shard that has answered its last call."""
        with self._lock:
            for stream in self.streams:
                stream.send_waiting(deadline)

    def flush(self, deadline: float) -> None:
        """Wait until the shards have every row that was pushed."""
        with self._lock:
            for stream in self.streams:
                stream.flush(deadline)
