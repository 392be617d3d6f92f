# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
"""The calls of other libraries whose launches are counted, as their own training loops make them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict

NUM_ENVS, OBS, ACTION, STEPS, BATCH = 4096, 48, 12, 24, 4096
ROWS = 32
"""Rows per environment in other libraries' buffers; the number changes no count."""
CALLS = (
    "replay add", "replay add, prioritized", "uniform sample after a write", "3-step sample", "sequences of 16",
    "the same with burn-in, across episodes", "prioritized draw and update", "GAE of 24 steps",
    "minibatch of a rollout", "rollout add",
)  # fmt: skip
Calls = Mapping[str, Callable[[], Callable[[], object]]]
"""Functions that prepare a call, by the call's name."""


def transition(device: str) -> dict[str, torch.Tensor]:
    """Return one step of all environments for a replay buffer."""
    return step(device) | {"next_obs": torch.zeros(NUM_ENVS, OBS, device=device)}


def rollout_step(device: str) -> dict[str, torch.Tensor]:
    """Return one step of all environments for a rollout."""
    return step(device) | {name: torch.zeros(NUM_ENVS, device=device) for name in ("value", "log_prob")}


def step(device: str) -> dict[str, torch.Tensor]:
    """Return the fields that both kinds of steps have."""
    shapes = {"obs": (NUM_ENVS, OBS), "action": (NUM_ENVS, ACTION), "reward": (NUM_ENVS,)}
    flags = {name: torch.zeros(NUM_ENVS, dtype=torch.bool, device=device) for name in ("terminated", "truncated")}
    return {name: torch.zeros(shape, device=device) for name, shape in shapes.items()} | flags


def installed_peers(fasttd3: Path | None, device: str = "cpu") -> Iterator[tuple[str, Calls]]:
    """Yield every installed library with its calls on a device."""
    if fasttd3 is not None:
        yield "FastTD3", _fasttd3(fasttd3, device)
    for title, calls in (("TorchRL", _torchrl), ("skrl", _skrl), ("rsl_rl", _rsl_rl), ("CleanRL", _cleanrl)):
        try:
            yield title, calls(device)
        except ImportError as error:
            print(f"{title} is missing: {error}")


def _fasttd3(path: Path, device: str) -> Calls:
    spec = spec_from_file_location("fast_td3_utils", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)

    def fill_buffer(n_steps: int = 1) -> Any:
        buffer = module.SimpleReplayBuffer(NUM_ENVS, ROWS, OBS, ACTION, OBS, n_steps=n_steps, device=device)
        for _ in range(ROWS + 1):
            buffer.extend(given)
        return buffer

    now = transition(device)
    done = (now["terminated"] | now["truncated"]).long()
    after = {"rewards": now["reward"], "dones": done, "truncations": done, "observations": now["next_obs"]}
    given = TensorDict({"observations": now["obs"], "actions": now["action"], "next": after}, [NUM_ENVS])

    def add() -> Callable[[], object]:
        buffer = fill_buffer()
        return lambda: buffer.extend(given)

    def sample(n_steps: int) -> Callable[[], object]:
        buffer = fill_buffer(n_steps)
        return lambda: buffer.sample(1)

    samples = {"uniform sample after a write": lambda: sample(1), "3-step sample": lambda: sample(3)}
    return {"replay add": add, **samples}


def _torchrl(device: str) -> Calls:
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    from torchrl.objectives.value.functional import vec_generalized_advantage_estimate

    now = transition(device)
    after = {"observation": now["next_obs"]} | {
        name: now[name].unsqueeze(-1) for name in ("reward", "terminated", "truncated")
    }
    given = TensorDict({"observation": now["obs"], "action": now["action"], "next": after}, [NUM_ENVS])

    def fill_buffer() -> Any:
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(ROWS * NUM_ENVS, device=device), batch_size=BATCH)
        for _ in range(3):
            buffer.extend(given)
        return buffer

    def add() -> Callable[[], object]:
        buffer = fill_buffer()
        return lambda: buffer.extend(given)

    def sample() -> Callable[[], object]:
        buffer = fill_buffer()
        return buffer.sample

    def gae() -> Callable[[], object]:
        value, next_value, reward = (torch.zeros(NUM_ENVS, STEPS, 1, device=device) for _ in range(3))
        done = torch.zeros(NUM_ENVS, STEPS, 1, dtype=torch.bool, device=device)
        return lambda: vec_generalized_advantage_estimate(0.99, 0.95, value, next_value, reward, done, done)

    return {"replay add": add, "uniform sample after a write": sample, "GAE of 24 steps": gae}


def _skrl(device: str) -> Calls:
    from skrl.agents.torch.ppo.ppo import compute_gae
    from skrl.memories.torch import RandomMemory

    def memory(names: Mapping[str, torch.Tensor], rows: int) -> Any:
        buffer = RandomMemory(memory_size=rows, num_envs=NUM_ENVS, device=device, replacement=True)
        for name, value in names.items():
            buffer.create_tensor(name, size=value.shape[-1], dtype=value.dtype)
        for _ in range(rows):
            buffer.add_samples(**names)
        return buffer

    def columns(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value if value.ndim == 2 else value.unsqueeze(-1) for name, value in values.items()}

    def add(step: Mapping[str, torch.Tensor], rows: int) -> Callable[[], object]:
        buffer = memory(step, rows)
        return lambda: buffer.add_samples(**step)

    def sample(length: int) -> Callable[[], object]:
        buffer = memory(replayed, ROWS)
        return lambda: buffer.sample(list(replayed), batch_size=BATCH, sequence_length=length)

    def gae() -> Callable[[], object]:
        reward, value, flag = (
            torch.zeros(STEPS, NUM_ENVS, 1, dtype=dtype, device=device) for dtype in (*[torch.float32] * 2, torch.bool)
        )
        return lambda: compute_gae(
            rewards=reward, terminated=flag, truncated=flag, values=value, last_values=value[-1],
            time_limit_bootstrap=True,
        )  # fmt: skip

    replayed, rolled = columns(transition(device)), columns(rollout_step(device))
    return {
        "replay add": lambda: add(replayed, ROWS),
        "uniform sample after a write": lambda: sample(1),
        "sequences of 16": lambda: sample(16),
        "GAE of 24 steps": gae,
        "rollout add": lambda: add(rolled, STEPS),
    }


def _rsl_rl(device: str) -> Calls:
    from rsl_rl.algorithms import PPO
    from rsl_rl.storage import RolloutStorage

    now = rollout_step(device)
    obs = TensorDict({"policy": now["obs"]}, [NUM_ENVS])

    def transition() -> Any:
        step = RolloutStorage.Transition()
        step.observations, step.actions, step.rewards = obs, now["action"], now["reward"]
        step.dones, step.values = now["terminated"], now["value"].unsqueeze(1)
        step.actions_log_prob, step.distribution_params = now["log_prob"], (now["action"], now["action"])
        return step

    def storage(steps: int) -> Any:
        rollout = RolloutStorage("rl", NUM_ENVS, STEPS, obs, (ACTION,), device)
        for _ in range(steps):
            rollout.add_transition(transition())
        return rollout

    def add() -> Callable[[], object]:
        rollout, coming = storage(1), transition()
        return lambda: rollout.add_transition(coming)

    def minibatch() -> Callable[[], object]:
        batches = storage(STEPS).mini_batch_generator(STEPS, num_epochs=2)
        next(batches)
        return lambda: next(batches)

    def gae() -> Callable[[], object]:
        names = {"gamma": 0.99, "lam": 0.95, "normalize_advantage_per_mini_batch": True}
        learner: Any = SimpleNamespace(storage=storage(STEPS), critic=_Critic(now["value"].unsqueeze(1)), **names)
        return lambda: PPO.compute_returns(learner, obs)

    return {"GAE of 24 steps": gae, "minibatch of a rollout": minibatch, "rollout add": add}


class _Critic:
    """A critic for rsl_rl that returns a constant."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value

    def __call__(self, obs: Any) -> torch.Tensor:
        return self._value

    def get_hidden_state(self) -> None:
        return None

    def reset(self, hidden_state: Any = None) -> None:
        pass


def _cleanrl(device: str) -> Calls:
    """Tensors [T, N, …] and an index, as in CleanRL's scripts."""
    now = rollout_step(device)
    stored = {name: torch.zeros(STEPS, *value.shape, dtype=value.dtype, device=device) for name, value in now.items()}

    def write(t: int) -> None:
        for name, value in now.items():
            stored[name][t] = value

    def gae() -> None:
        reward, value, done = stored["reward"], stored["value"], stored["terminated"].float()
        advantage, running, next_value = torch.zeros_like(reward), torch.zeros_like(value[0]), value[-1]
        for t in reversed(range(STEPS)):
            alive = 1.0 - done[t]
            delta = reward[t] + 0.99 * next_value * alive - value[t]
            advantage[t] = running = delta + 0.99 * 0.95 * alive * running
            next_value = value[t]
        _ = advantage + value

    def minibatch() -> Callable[[], object]:
        flat = [stored[name].flatten(0, 1) for name in ("obs", "action", "value", "log_prob", "reward", "reward")]
        order = torch.randperm(STEPS * NUM_ENVS, device=device)
        return lambda: [leaf[order[:BATCH]] for leaf in flat]

    return {
        "GAE of 24 steps": lambda: gae,
        "minibatch of a rollout": minibatch,
        "rollout add": lambda: lambda: write(0),
    }
