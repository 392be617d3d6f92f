"""EmbodiChain's two rollout buffers, each under its module path, and the targets that its algorithms compute from them.

`learning.rl.buffer.RolloutBuffer` is one shared TensorDict `[N, T + 1]` (the newer one, also here as `RolloutBuffer`),
`agents.rl.buffer.RolloutBuffer` stores steps `[T, N]` (the older one, also here as `StepRolloutBuffer`).

Differences from EmbodiChain that matter for learning:

- A truncated step bootstraps. EmbodiChain resets in the same step, so the value stored after an end is that of the next
  episode. `compute_gae` and `next_value` of `transition_view` take the value of the true final observation where the
  rollout has a field "final_value", otherwise the value of the truncated state.
- Only rows that were stored are iterated, every field added to a rollout goes through `transition_view`, and none of
  them outlives `start_rollout`.
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
