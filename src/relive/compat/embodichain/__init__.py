"""EmbodiChain's two rollout buffers, and the advantages that its algorithms compute, under EmbodiChain's module paths.

`learning.rl.buffer.RolloutBuffer` is one shared TensorDict `[N, T + 1]` (the newer one, also here as `RolloutBuffer`),
`agents.rl.buffer.RolloutBuffer` stores steps `[T, N]` (the older one, also here as `StepRolloutBuffer`).

Differences from EmbodiChain that matter for learning:

- A truncated step bootstraps. EmbodiChain resets in the same step, so the next stored value belongs to the next
  episode. `compute_gae` and `next_value` of `transition_view` use the field "final_value", the value of the true final
  observation, if the rollout has it, otherwise the value of the truncated state.
- Only stored rows are read. `transition_view` returns every field that was added to a rollout, and `start_rollout`
  removes it.
- Extras of a wrong shape and values of a wrong dtype are refused, instead of dropped or cast.
- No global generator is used: a seeded experiment repeats, and `seed=` repeats one buffer's batches.

`relive.compat.patch("embodichain")` lets its trainer, PPO and GRPO use these buffers and functions.
"""

from relive.compat.embodichain.agents.rl.buffer.rollout_buffer import RolloutBuffer as StepRolloutBuffer
from relive.compat.embodichain.learning.rl.algo.common import compute_gae, compute_group_advantage
from relive.compat.embodichain.learning.rl.buffer import RolloutBuffer, iterate_minibatches, transition_view

__all__ = [
    "RolloutBuffer",
    "StepRolloutBuffer",
    "compute_gae",
    "compute_group_advantage",
    "iterate_minibatches",
    "transition_view",
]
