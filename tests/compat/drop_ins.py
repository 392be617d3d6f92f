"""The buffers of every adapter: how each is made, written and drawn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict

from relive.compat import agilerl, apexrl, embodichain, rl_buffer
from relive.compat.rsl_rl import RolloutStorage

STEPS, N = 4, 4
BOX = spaces.Box(-99, 99, (3,), np.float32)
OBS, SCALAR = (3,), ()


@dataclass(frozen=True)
class DropIn:
    """A buffer with room for `STEPS` steps of `N` environments."""

    kind: type
    arguments: Callable[[], tuple[Any, ...]]
    add: Callable[[Any, float], Any]
    """Adds a step whose rewards and actions are a number + env / 10."""
    draw: Callable[[Any], Any]
    """Returns a random batch as a tensor."""
    rewards: str = "rewards"
    """The attribute, or attribute and key, of the memory of rewards; empty without such an attribute."""
    options: tuple[tuple[str, Any], ...] = ()
    seeded: bool = True
    """Whether it has the argument `seed`."""
    wraps: bool = True
    """Whether a full buffer accepts further steps."""

    def make(self, seed: int | None = None) -> Any:
        return self.kind(*self.arguments(), **dict(self.options), **({"seed": seed} if self.seeded else {}))

    def memory(self, buffer: Any) -> Any:
        """Return the writable memory of the rewards."""
        for part in self.rewards.split("."):
            buffer = buffer[part] if isinstance(buffer, TensorDict | dict) else getattr(buffer, part)
        return buffer


def numbers(number: float) -> torch.Tensor:
    return number + torch.arange(N) / 10


def observations(number: float) -> torch.Tensor:
    return numbers(number).unsqueeze(1).repeat(1, 3)


FLAGS = torch.tensor([True, False, False, False])
ZEROS = torch.zeros(N)


def add_agilerl(buffer: Any, number: float) -> None:
    row = numbers(number)
    step = {"obs": observations(number), "action": row, "reward": row, "next_obs": observations(number + 0.5)}
    buffer.add(TensorDict({**step, "done": FLAGS.float()}, [N]))


def add_agilerl_by_priority(buffer: Any, number: float) -> None:
    add_agilerl(buffer, number)
    buffer.update_priorities(buffer.sample(3)["idxs"], [1.0, 4.0, 9.0])


def add_agilerl_rollout(buffer: Any, number: float) -> None:
    row = numbers(number)
    buffer.add(observations(number), observations(number), row, FLAGS, row, row)


def add_apexrl_replay(buffer: Any, number: float) -> None:
    row = numbers(number)
    buffer.add(observations(number), row, row, observations(number + 0.5), FLAGS)


def add_apexrl_rollout(buffer: Any, number: float, *hidden: Any) -> None:
    row = numbers(number)
    buffer.add(observations(number), None, row, row, FLAGS, row, row, *hidden)
    buffer.compute_returns_and_advantages(ZEROS)


def add_team(buffer: Any, number: float) -> None:
    rows = {"a": numbers(number)}
    step = dict.fromkeys(("actions", "rewards", "values", "log_probs"), rows)
    buffer.add(observations={"a": observations(number)}, state=None, dones={"a": FLAGS}, **step)


def add_embodichain(buffer: Any, number: float) -> None:
    row = numbers(number)
    buffer.add(observations(number), row.unsqueeze(1), row, FLAGS, row, row)
    buffer.set_extras({"advantages": torch.arange(STEPS * N).view(STEPS, N)})


def write_shared(buffer: Any, number: float) -> None:
    buffer.buffer["reward"][:, :-1] = number + torch.arange(STEPS * N).view(N, STEPS)


def draw_shared(buffer: Any) -> torch.Tensor:
    flat = embodichain.transition_view(buffer.buffer, flatten=True)
    return next(embodichain.iterate_minibatches(flat, 7, "cpu"))["reward"]


def add_rl_buffer(buffer: Any, number: float) -> None:
    row = numbers(number)
    buffer.add(observations(number), row, row, FLAGS, observations(number + 0.5), ~FLAGS)


def add_rl_buffer_by_priority(buffer: Any, number: float) -> None:
    add_rl_buffer(buffer, number)
    buffer.update_priorities(buffer.get(3).indices, [1.0, 4.0, 9.0])


def add_rl_buffer_rollout(buffer: Any, number: float) -> None:
    row = numbers(number)
    buffer.add(observations(number), row, row, FLAGS, row, row)
    buffer.compute_returns_and_advantages(ZEROS, ZEROS)


def add_rsl_rl(storage: Any, number: float) -> None:
    step: Any = storage.Transition()
    row = numbers(number)
    step.observations = TensorDict({"policy": observations(number)}, [N])
    step.actions = step.privileged_actions = row.unsqueeze(1)
    step.rewards, step.dones, step.values, step.actions_log_prob = row, FLAGS, row.unsqueeze(1), row
    step.distribution_params = (row.unsqueeze(1),)
    step.hidden_states = row.view(1, N, 1), None
    storage.add_transition(step)


def add_sb3(buffer: Any, number: float) -> None:
    obs = observations(number).numpy()
    buffer.add(obs, obs + 0.5, obs, numbers(number).numpy(), FLAGS.numpy(), [{}] * N)


def add_sb3_rollout(buffer: Any, number: float) -> None:
    obs, row = observations(number).numpy(), numbers(number)
    buffer.add(obs, obs, row.numpy(), FLAGS.numpy(), row, row)


def replay(*more: Any) -> Callable[[], tuple[Any, ...]]:
    return lambda: (STEPS * N, *more)


def rl_buffer_arguments() -> tuple[Any, ...]:
    return STEPS, N, OBS, SCALAR, rl_buffer.StatsTracker(N)


def rsl_rl(training: str, draw: Callable[[Any], Any]) -> DropIn:
    obs = TensorDict({"policy": observations(0)}, [N])
    return DropIn(RolloutStorage, lambda: (training, N, STEPS, obs, (1,)), add_rsl_rl, draw, seeded=False, wraps=False)


DROP_INS = {
    "agilerl": DropIn(agilerl.ReplayBuffer, replay(), add_agilerl, lambda b: b.sample(7)["reward"], "storage.reward"),
    "agilerl, prioritized": DropIn(
        agilerl.PrioritizedReplayBuffer, replay(), add_agilerl_by_priority, lambda b: b.sample(7)["reward"],
        "storage.reward",
    ),
    "agilerl, n steps": DropIn(
        agilerl.MultiStepReplayBuffer, replay(2), add_agilerl, lambda b: b.sample(7)["reward"], "storage.reward"
    ),
    "agilerl, rollout": DropIn(
        agilerl.RolloutBuffer, lambda: (STEPS, BOX, BOX, N), add_agilerl_rollout,
        lambda b: torch.tensor(b.get(3)["rewards"]), "buffer.rewards", (("wrap_at_capacity", True),),
    ),
    "apexrl": DropIn(apexrl.ReplayBuffer, replay(OBS), add_apexrl_replay, lambda b: b.sample(4)["rewards"]),
    "apexrl, distillation": DropIn(
        apexrl.DistillationBuffer, replay(OBS), lambda b, i: b.add(observations(i), numbers(i)),
        lambda b: b.sample(4)[1], "",
    ),
    "apexrl, rollout": DropIn(
        apexrl.RolloutBuffer, lambda: (N, STEPS, OBS), add_apexrl_rollout, lambda b: b.get_minibatch(7)[4], wraps=False
    ),
    "apexrl, recurrent": DropIn(
        apexrl.RolloutRNNBuffer, lambda: (N, STEPS, OBS, SCALAR, torch.float32, (1, 1), (1, 1), "cpu"),
        lambda b, i: add_apexrl_rollout(b, i, *numbers(i).view(2, 1, N // 2, 1).repeat(1, 1, 2, 1)),
        lambda b: next(b.get_sequence_minibatches(1, 7))["advantages"], wraps=False,
    ),
    "apexrl, team": DropIn(
        apexrl.MultiAgentRolloutBuffer, tuple, add_team, lambda b: b.get_agent_data("a")["actions"], "rewards.a",
        (("possible_agents", ["a"]), ("num_envs", N), ("num_steps", STEPS), ("obs_specs", {"a": OBS}),
         ("action_shapes", {"a": SCALAR}), ("action_dtypes", {"a": torch.float32}), ("device", "cpu")),
        seeded=False, wraps=False,
    ),
    "embodichain": DropIn(
        embodichain.RolloutBuffer, lambda: (N, STEPS, 3, 1, "cpu"), write_shared, draw_shared, "buffer.reward",
        seeded=False,
    ),
    "embodichain, steps": DropIn(
        embodichain.StepRolloutBuffer, lambda: (STEPS, N, 3, 1, "cpu"), add_embodichain,
        lambda b: next(b.iterate_minibatches(7))["advantages"], wraps=False,
    ),
    "rl_buffer": DropIn(
        rl_buffer.ReplayBuffer, rl_buffer_arguments, add_rl_buffer, lambda b: b.get(4).rewards, "_rewards"
    ),
    "rl_buffer, prioritized": DropIn(
        rl_buffer.PrioritizedReplayBuffer, rl_buffer_arguments, add_rl_buffer_by_priority, lambda b: b.get(4).rewards,
        "_rewards",
    ),
    "rl_buffer, rollout": DropIn(
        rl_buffer.RolloutBuffer, rl_buffer_arguments, add_rl_buffer_rollout, lambda b: next(b.get(7)).advantages,
        "_rewards", wraps=False,
    ),
    "rsl_rl": rsl_rl("rl", lambda b: next(b.mini_batch_generator(2, 1)).actions),
    "rsl_rl, distillation": rsl_rl(
        "distillation", lambda b: torch.stack([each.privileged_actions for each in b.generator()])
    ),
}  # fmt: skip
if find_spec("stable_baselines3"):
    from relive.compat import stable_baselines3 as sb3

    DROP_INS |= {
        "sb3": DropIn(
            sb3.ReplayBuffer, lambda: (STEPS * N, BOX, BOX, "cpu", N), add_sb3, lambda b: b.sample(7).rewards,
            seeded=False,
        ),
        "sb3, prioritized": DropIn(
            sb3.PrioritizedReplayBuffer, lambda: (STEPS * N, BOX, BOX, "cpu", N), add_sb3,
            lambda b: b.sample(7).rewards, seeded=False,
        ),
        "sb3, rollout": DropIn(
            sb3.RolloutBuffer, lambda: (STEPS, BOX, BOX, "cpu", 1, 0.99, N), add_sb3_rollout,
            lambda b: next(b.get(7)).old_values, seeded=False, wraps=False,
        ),
    }  # fmt: skip
WRITABLE = [name for name, drop_in in DROP_INS.items() if drop_in.rewards]
DRAWN = [name for name in DROP_INS if name not in ("apexrl, team", "rsl_rl, distillation")]
"""The buffers whose batches are random."""


def fill(name: str, steps: int = STEPS, seed: int | None = None) -> Any:
    """Return a new buffer with a number of steps."""
    buffer = DROP_INS[name].make(seed)
    for number in range(steps):
        DROP_INS[name].add(buffer, float(number))
    return buffer
