"""EmbodiChain's two rollout buffers, each under its module path, and what its algorithms compute from them.

`learning.rl.buffer.RolloutBuffer` is one shared TensorDict `[N, T + 1]` (the newer one, also here as `RolloutBuffer`),
`agents.rl.buffer.RolloutBuffer` stores steps `[T, N]` (the older one, also here as `StepRolloutBuffer`). What is
different here, because it matters for learning:

- A truncated step bootstraps. EmbodiChain resets in the same step, so the value stored after an end is that of the next
  episode. `compute_gae` and `next_value` of `transition_view` take the value of the true final observation where the
  rollout has a field "final_value", and else the value of the state that was truncated.
- Only rows that were stored are iterated, every field added to a rollout goes through `transition_view`, and none of
  them outlives `start_rollout`.
- Extras of another shape, and flags or numbers of another kind, are refused instead of left out or cast.
- No global generator is used: a seeded experiment repeats, and `seed=` repeats one buffer's batches.

Where EmbodiChain is installed, its trainer, PPO and GRPO are here too, with these buffers and functions, and all of its
other modules.
"""

from relive.compat.embodichain.agents.rl.buffer.rollout_buffer import RolloutBuffer as StepRolloutBuffer
from relive.compat.embodichain.learning.rl.algo.common import compute_gae, compute_group_advantage
from relive.compat.embodichain.learning.rl.buffer import RolloutBuffer, iterate_minibatches, transition_view
from relive.compat.forwarding import forward, names_of

__all__ = [
    "RolloutBuffer",
    "StepRolloutBuffer",
    "compute_gae",
    "compute_group_advantage",
    "iterate_minibatches",
    "transition_view",
]

_ROOTS = ("learning.rl", "agents.rl")  # the second in releases before 0.2.3
_ON_BUFFERS = ("algo", "differentiable_trainer", "routing", "train", "utils.trainer")
forward("embodichain", again=[f"{root}.{name}" for root in _ROOTS for name in _ON_BUFFERS])

__getattr__ = names_of("embodichain")
