# pyright: reportMissingImports=false
"""sb3-contrib's algorithms on our buffers, and its rollout buffers compared with ours."""

from __future__ import annotations

import copy
import importlib
import itertools
import pickle
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from gymnasium import spaces

pytest.importorskip("sb3_contrib", reason="needs sb3-contrib: pip install sb3-contrib")

from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import IdentityEnv

ours: Any = importlib.import_module("relive.compat.sb3_contrib")
theirs: Any = importlib.import_module("sb3_contrib")

VECTOR = spaces.Box(-9, 9, (3,), np.float32)
NESTED = spaces.Dict({"vector": VECTOR, "image": spaces.Box(0, 255, (2, 4, 4), np.uint8)})
BOX, BUTTONS = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(4)
STEPS, ENVS, LAYERS, SIZE = 24, 3, 2, 5


def draw_values(space: Any, random: np.random.Generator) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: draw_values(part, random) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Discrete):
        return random.integers(int(space.n), size=ENVS)
    return random.integers(9, size=(ENVS, *space.shape)).astype(space.dtype)


def both_classes(module: str, name: str) -> list[Any]:
    """Return the class of sb3-contrib and ours."""
    return [
        getattr(importlib.import_module(f"{prefix}{module}"), name)
        for prefix in ("sb3_contrib.", "relive.compat.sb3_contrib.")
    ]


def fill_rollout(kind: Any, obs: Any, action: Any, make_extra: Any, *shape: Any) -> Any:
    """Return a full rollout of a class; `make_extra` returns the additional values of a step."""
    random, started = np.random.default_rng(0), np.ones(ENVS, np.bool_)
    buffer = kind(STEPS, obs, action, *shape, device="cpu", n_envs=ENVS, gae_lambda=0.9)
    torch.manual_seed(0)
    for _ in range(STEPS):
        step = (draw_values(obs, random), draw_values(action, random), random.normal(size=ENVS), started)
        buffer.add(*step, torch.randn(ENVS, 1), torch.randn(ENVS), **make_extra(random))
        started = random.random(ENVS) < 0.2
    buffer.compute_returns_and_advantage(torch.ones(ENVS), started)
    return buffer


def same(mine: Any, other: Any) -> None:
    if isinstance(mine, torch.Tensor):
        torch.testing.assert_close(mine, other)
    elif isinstance(mine, dict):
        assert mine.keys() == other.keys()
        for key in mine:
            same(mine[key], other[key])
    else:
        assert type(mine) is type(other)
        for a, b in zip(mine, other, strict=True):
            same(a, b)


def states(_: np.random.Generator) -> dict[str, Any]:
    parts = [torch.rand(LAYERS, ENVS, SIZE) for _ in range(4)]
    kind = importlib.import_module("sb3_contrib.common.recurrent.type_aliases").RNNStates
    return {"lstm_states": kind((parts[0], parts[1]), (parts[2], parts[3]))}


@pytest.mark.parametrize(("name", "obs", "action"), [("Recurrent", VECTOR, BUTTONS), ("RecurrentDict", NESTED, BOX)])
def test_padded_sequences_equal_those_of_sb3_contrib(name: str, obs: Any, action: Any) -> None:
    shape = (STEPS, LAYERS, ENVS, SIZE)
    both = both_classes("common.recurrent.buffers", f"{name}RolloutBuffer")
    other, mine = (fill_rollout(kind, obs, action, states, shape) for kind in both)
    assert isinstance(mine, type(other))
    for turn in (0, 5, 23, 40, 71):
        with mock.patch.object(np.random, "randint", return_value=turn):
            expected = list(other.get(20))
        mine._random = mock.Mock(integers=lambda _, turn=turn: turn)
        same(list(mine.get(20)), expected)


@pytest.mark.parametrize(("name", "obs"), [("Maskable", VECTOR), ("MaskableDict", NESTED)])
def test_action_masks_equal_those_of_sb3_contrib(name: str, obs: Any) -> None:
    def masks(random: np.random.Generator) -> dict[str, Any]:
        return {"action_masks": random.random((ENVS, 4)) < 0.5}

    both = both_classes("common.maskable.buffers", f"{name}RolloutBuffer")
    other, mine = (fill_rollout(kind, obs, BUTTONS, masks) for kind in both)
    assert isinstance(mine, type(other))
    # `get` of the original flattens its arrays.
    next(other.get(1))
    (batch,) = mine.get()
    places = {value: number for number, value in enumerate(other.values.flatten().tolist())}
    same(batch, other._get_samples(np.array([places[value] for value in batch.old_values.tolist()])))
    twin = pickle.loads(pickle.dumps(mine))
    np.testing.assert_array_equal(twin.action_masks, mine.action_masks)
    mine.reset()
    assert mine.action_masks.all()
    with pytest.raises(ValueError, match="Unsupported action space"):
        type(mine)(STEPS, obs, BOX)


@pytest.mark.parametrize("name", ["Recurrent", "RecurrentDict", "Maskable", "MaskableDict"])
def test_batches_go_through_the_samples_of_a_subclass(name: str) -> None:
    is_recurrent = name.startswith("Recurrent")
    module = "recurrent" if is_recurrent else "maskable"
    make_extra, shape = (states, [(STEPS, LAYERS, ENVS, SIZE)]) if is_recurrent else (lambda _: {}, [])
    found = []
    for base in both_classes(f"common.{module}.buffers", f"{name}RolloutBuffer"):

        def doubled(self: Any, *args: Any, base: Any = base) -> Any:
            samples = base._get_samples(self, *args)
            return samples._replace(returns=samples.returns * 2)

        kind = type("Doubled", (base,), {"_get_samples": doubled})
        buffer = fill_rollout(kind, NESTED if "Dict" in name else VECTOR, BUTTONS, make_extra, *shape)
        np.random.seed(0)  # noqa: NPY002 (sb3-contrib's loop draws from it)
        found.append(list(buffer.get(20)))
    same(found[1], found[0])


REPLAYED = {"learning_starts": 50, "policy_kwargs": {"net_arch": [16]}}
ALGORITHMS = {
    "QRDQN": ("MlpPolicy", "CartPole-v1", REPLAYED, "ReplayBuffer"),
    "TQC": ("MlpPolicy", "Pendulum-v1", REPLAYED, "ReplayBuffer"),
    "CrossQ": ("MlpPolicy", "Pendulum-v1", REPLAYED, "ReplayBuffer"),
    "TRPO": ("MlpPolicy", "Pendulum-v1", {"n_steps": 64, "batch_size": 32}, "RolloutBuffer"),
    "RecurrentPPO": ("MlpLstmPolicy", "CartPole-v1", {"n_steps": 32, "batch_size": 16}, "RecurrentRolloutBuffer"),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_train_on_our_buffers(name: str) -> None:
    policy, env, options, kind = ALGORITHMS[name]
    model = getattr(ours, name)(policy, make_vec_env(env, 2), device="cpu", seed=0, **options)
    before = copy.deepcopy(model.policy.state_dict())
    model.learn(150)
    assert any(not torch.equal(before[key], tensor) for key, tensor in model.policy.state_dict().items())
    buffer = getattr(model, "rollout_buffer", None) or model.replay_buffer
    assert type(buffer).__name__ == kind
    assert type(buffer).__module__.startswith("relive.compat")


def test_recurrent_ppo_learns_the_same_weights_from_the_same_draws() -> None:
    learnt = []
    for owner in (theirs, ours):
        model = owner.RecurrentPPO(
            "MlpLstmPolicy", make_vec_env("CartPole-v1", 2), n_steps=16, batch_size=8, n_epochs=2, seed=0, device="cpu",
            policy_kwargs={"lstm_hidden_size": 8},
        )  # fmt: skip
        turns = itertools.cycle([0, 5, 23, 31])
        model.rollout_buffer._random = mock.Mock(integers=lambda _, turns=turns: next(turns))
        with mock.patch.object(np.random, "randint", lambda _, turns=turns: next(turns)):
            model.learn(96)
        learnt.append(model.policy.state_dict())
    for key, tensor in learnt[0].items():
        torch.testing.assert_close(tensor, learnt[1][key], rtol=1e-4, atol=1e-6)


def test_maskable_ppo_learns_the_same_weights_from_the_same_batches() -> None:
    env = importlib.import_module("sb3_contrib.common.envs").InvalidActionEnvDiscrete
    learnt = []
    # Only one rollout is compared: later ones depend on numpy's generator, which the original's buffer advances.
    for owner in (theirs, ours):
        model = owner.MaskablePPO(
            "MlpPolicy", env(dim=12, n_invalid_actions=6), n_steps=64, batch_size=64, n_epochs=4, seed=0, device="cpu"
        ).learn(64)
        learnt.append(model.policy.state_dict())
    for key, tensor in learnt[0].items():
        torch.testing.assert_close(tensor, learnt[1][key], rtol=1e-4, atol=1e-5)


def test_algorithms_without_a_buffer_are_those_of_sb3_contrib() -> None:
    assert ours.ARS is theirs.ARS
    model = ours.ARS("LinearPolicy", IdentityEnv(dim=2), n_delta=1, device="cpu").learn(20)
    assert model.num_timesteps >= 20


@pytest.mark.parametrize("root", ["stable_baselines3", "sb3_contrib"])
def test_a_star_import_gets_every_name_of_the_original(root: str) -> None:
    original, mine = importlib.import_module(root), importlib.import_module(f"relive.compat.{root}")
    assert set(original.__all__) <= set(mine.__all__)
