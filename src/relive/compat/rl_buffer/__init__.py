"""rl-buffer's names on relive's core: replay buffers (shared, prioritized), `RolloutBuffer`, `StatsTracker`, `SumTree`.

`len`, `capacity` and `full` count time steps; `total_capacity` and `total_current_size` count transitions. Differences
from rl-buffer that matter for learning:

- `done[t]` ends the episode after step t, for advantages and for statistics. `last_dones` may repeat the last `done`.
- Only stored steps are trained on, and `get` raises before advantages are computed.
- As in rl-buffer, truncated steps end no episode in the statistics, unless `StatsTracker(…, truncated_ends=True)`.
- `reset()` also removes priorities. Indices are permanent row ids: a priority for an overwritten row has no effect.
- A rollout with `ResetStrategy.RECURRENT` stays in time order: it drops the oldest step when it is full.
- `explained_variance` of a rollout compares its returns with its values.
- A step that raises changes nothing, next observations have the dtype of observations, and everything is stored on
  `store_device`, or on `device` without it.
- No global generator is used: `seed=` makes draws repeatable.
"""

from relive.compat.rl_buffer.base_buffer import BaseBuffer, ResetStrategy
from relive.compat.rl_buffer.prioritized_replay_buffer import PrioritizedReplayBatch, PrioritizedReplayBuffer
from relive.compat.rl_buffer.replay_buffer import ReplayBatch, ReplayBuffer
from relive.compat.rl_buffer.rollout_buffer import RolloutBatch, RolloutBuffer, SequenceBatch, explained_variance
from relive.compat.rl_buffer.shared_base_buffer import SharedBaseBuffer
from relive.compat.rl_buffer.shared_replay_buffer import SharedMemoryComponents, SharedReplayBuffer, SharedStates
from relive.compat.rl_buffer.stats_tracker import StatsTracker
from relive.compat.rl_buffer.utils.sum_tree import SumTree

__all__ = [
    "BaseBuffer", "PrioritizedReplayBatch", "PrioritizedReplayBuffer", "ReplayBatch", "ReplayBuffer", "ResetStrategy",
    "RolloutBatch", "RolloutBuffer", "SequenceBatch", "SharedBaseBuffer", "SharedMemoryComponents",
    "SharedReplayBuffer", "SharedStates", "StatsTracker", "SumTree", "explained_variance",
]  # fmt: skip
