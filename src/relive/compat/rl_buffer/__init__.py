"""rl-buffer's names on our core: its replay buffers (shared, prioritized), `RolloutBuffer`, `StatsTracker`, `SumTree`.

Sizes (`len`, `capacity`, `full`) count time steps; the `total_` ones count transitions. What is different here, because
it matters for learning:

- `done` is what the step just taken led to, for advantages as for statistics: `done[t]` ends the episode after step t.
  `last_dones` may repeat that of the last step.
- Only stored steps are trained on, and before advantages are computed there is nothing to train on.
- As in rl-buffer truncated steps end no episode in the statistics, unless `StatsTracker(…, truncated_ends=True)`.
- `reset()` forgets priorities too. Indices name rows for ever, so that a priority meant for a row that was overwritten
  changes nothing.
- A rollout with `ResetStrategy.RECURRENT` stays in the order of time: the oldest step makes room.
- `explained_variance` of a rollout is that of its returns by its values.
- A step that does not fit changes nothing, next observations have the dtype of observations, and everything is stored
  on `store_device`, or on `device` where there is none.
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
