"""rsl_rl's own runners on our storage, compared with its own storage."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from relive.compat.rsl_rl.storage.rollout_storage import RolloutStorage

theirs: Any = pytest.importorskip("rsl_rl.runners", reason='rsl_rl is not installed: pip install ".[rsl_rl]"')

from rsl_rl.storage import RolloutStorage as Original  # noqa: E402

from relive.compat.rsl_rl import algorithms, runners  # noqa: E402
from tests.compat.rsl_rl_world import Pucks, distillation_settings, make_recurrent, ppo_settings  # noqa: E402
from tests.tiers import select  # noqa: E402

pytestmark = [
    # The dependencies of rsl_rl warn.
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("silence_output"),
]


@pytest.fixture
def silence_output(capsys: pytest.CaptureFixture[str]) -> None:
    """Suppress the table that rsl_rl prints for every iteration."""


def train(module: Any, name: str, configuration: dict[str, Any], iterations: int, teacher: str | None = None) -> Any:
    """Return a runner after some iterations; torch is seeded before each iteration."""
    torch.manual_seed(0)
    runner = getattr(module, name)(Pucks(), configuration)
    if teacher is not None:
        runner.load(teacher)
    for i in range(iterations):
        torch.manual_seed(i)
        runner.learn(1)
    return runner


def weights(runner: Any) -> dict[str, torch.Tensor]:
    return dict(runner.alg.get_policy().state_dict())


def same(ours: Any, original: Any) -> bool:
    mine, others = weights(ours), weights(original)
    return mine.keys() == others.keys() and all(torch.equal(mine[name], others[name]) for name in mine)


@pytest.mark.parametrize("kind", select("lstm", of=["lstm", "gru"]))
def test_recurrent_ppo_gives_the_same_weights_bit_for_bit(kind: str) -> None:
    made = [
        train(module, "OnPolicyRunner", make_recurrent(ppo_settings(), "actor", "critic", kind=kind), 4)
        for module in (runners, theirs)
    ]
    assert type(made[0].alg.storage) is RolloutStorage
    assert type(made[1].alg.storage) is Original
    assert same(*made)
    assert not same(made[0], train(theirs, "OnPolicyRunner", make_recurrent(ppo_settings(), "actor", "critic"), 3))


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_distillation_gives_the_same_student_bit_for_bit(is_recurrent: bool, tmp_path: Any) -> None:
    teacher = str(tmp_path / "teacher.pt")
    training = ppo_settings()
    training["obs_groups"]["actor"] = ["policy", "critic"]
    expert = train(theirs, "OnPolicyRunner", training, 1)
    torch.save({**expert.alg.save(), "iter": 0, "infos": None}, teacher)
    students = [
        train(
            module,
            "DistillationRunner",
            make_recurrent(distillation_settings(), *["student"] * is_recurrent),
            4,
            teacher,
        )
        for module in (runners, theirs)
    ]
    assert type(students[0].alg.storage) is RolloutStorage
    assert same(*students)


def test_ppo_gives_nearly_the_same_weights_with_one_minibatch_per_epoch() -> None:
    """One minibatch is the whole rollout, so that only the order of a sum differs."""
    ours, original = (
        train(module, "OnPolicyRunner", ppo_settings(num_mini_batches=1, schedule="fixed"), 4)
        for module in (runners, theirs)
    )
    for name, weight in weights(original).items():
        assert torch.allclose(weights(ours)[name], weight, atol=1e-4), name


def evaluate(runner: Any) -> float:
    """Return the mean reward per step of the policy without noise, in a new world with a fixed seed."""
    world, total = Pucks(num_envs=256, seed=9), 0.0
    policy = runner.get_inference_policy()
    with torch.inference_mode():
        for _ in range(48):
            total += float(world.step(policy(world.get_observations()))[1].mean())
    return total / 48


@pytest.mark.thorough
def test_ppo_on_our_storage_reaches_the_reward_of_ppo_on_the_original() -> None:
    ours, original = (evaluate(train(module, "OnPolicyRunner", ppo_settings(), 30)) for module in (runners, theirs))
    untrained = evaluate(train(theirs, "OnPolicyRunner", ppo_settings(), 0))
    assert original > untrained + 0.3
    assert ours > original - 0.15, f"reward {ours:.2f} with our storage, {original:.2f} with theirs"


def test_the_configuration_alone_switches_to_our_storage(tmp_path: Any) -> None:
    settings_ = ppo_settings() | {"algorithm": {"class_name": "relive.compat.rsl_rl.algorithms:PPO"}}
    runner = train(theirs, "OnPolicyRunner", settings_, 1)
    assert type(runner.alg) is algorithms.PPO
    assert type(runner.alg.storage) is RolloutStorage
    runner.save(str(tmp_path / "model.pt"))
    again = train(theirs, "OnPolicyRunner", ppo_settings(), 0)
    again.load(str(tmp_path / "model.pt"))
    assert same(runner, again)

    distilled = distillation_settings()
    distilled["algorithm"]["class_name"] = algorithms.Distillation
    assert type(train(theirs, "DistillationRunner", distilled, 0).alg.storage) is RolloutStorage


def test_a_storage_of_our_class_or_of_a_user_is_not_replaced() -> None:
    original: Any = importlib.import_module("rsl_rl.storage").RolloutStorage
    module = importlib.import_module("relive.compat.rsl_rl.storage.rollout_storage")
    made = "rl", 2, 3, TensorDict({"policy": torch.zeros(2, 4)}, [2]), [2]
    for kind in (RolloutStorage, type("OfAUser", (original,), {})):
        own = kind(*made)
        assert module.replace_storage(own) is own
    assert type(module.replace_storage(original(*made))) is RolloutStorage


def test_training_with_symmetry_and_normalised_observations_runs() -> None:
    def mirrored(env: Any, obs: Any, actions: Any) -> tuple[Any, Any]:
        """Append mirrored observations and actions."""
        both = None if obs is None else torch.cat([obs, obs.apply(lambda leaf: -leaf)])
        return both, None if actions is None else torch.cat([actions, -actions])

    symmetry = {"use_data_augmentation": True, "use_mirror_loss": True, "mirror_loss_coeff": 0.1}
    configuration = ppo_settings(symmetry_cfg={**symmetry, "data_augmentation_func": mirrored})
    for network in ("actor", "critic"):
        configuration[network]["obs_normalization"] = True
    runner = train(runners, "OnPolicyRunner", configuration, 2)
    assert all(weight.isfinite().all() for weight in weights(runner).values())


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[int, int, int, int, bool]:
    num_envs = draw(st.integers(1, 5))
    steps = draw(st.integers(1, 7))
    return num_envs, steps, draw(st.integers(1, num_envs)), draw(st.integers(0, 2**16)), draw(st.booleans())


def fill_storage(kind: Any, training: str, num_envs: int, steps: int, seed: int, has_states: bool) -> Any:
    """Return a full storage of a class; every storage gets the same random steps."""
    random = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    storage = kind(
        training, num_envs, steps, TensorDict({"a": drawn(num_envs, 3), "b": drawn(num_envs)}, [num_envs]), [2]
    )
    for step in range(steps):
        made = kind.Transition()
        made.observations = TensorDict({"a": drawn(num_envs, 3), "b": drawn(num_envs)}, [num_envs])
        made.actions, made.privileged_actions = drawn(num_envs, 2), drawn(num_envs, 2)
        made.rewards, made.dones = drawn(num_envs), drawn(num_envs) > 0.7
        made.values, made.actions_log_prob = drawn(num_envs, 1), drawn(num_envs)
        made.distribution_params = (drawn(num_envs, 2), drawn(num_envs, 2))
        state = (drawn(2, num_envs, 4), drawn(2, num_envs, 4))
        if has_states and step:
            made.hidden_states = (state, state[0] + 1)
        storage.add_transition(made)
    if training == "rl":
        storage.returns, storage.advantages = drawn(steps, num_envs, 1), drawn(steps, num_envs, 1)
    return storage


def list_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a field of a batch in order."""
    if isinstance(value, TensorDict):
        return [value[key] for key in sorted(value.keys())]
    if isinstance(value, tuple | list):
        return [leaf for part in value for leaf in list_tensors(part)]
    return [] if value is None else [value]


def assert_same_batches(ours: Any, original: Any) -> None:
    for mine, other in zip(ours, original, strict=True):
        assert vars(mine).keys() == vars(other).keys()
        for name in vars(other):
            both = list_tensors(getattr(mine, name)), list_tensors(getattr(other, name))
            for a, b in zip(*both, strict=True):
                assert (a.dtype, a.shape) == (b.dtype, b.shape), name
                assert torch.equal(a, b), name


@settings(max_examples=60, deadline=None)
@given(rollouts())
def test_recurrent_minibatches_are_those_of_the_original(rollout: tuple[int, int, int, int, bool]) -> None:
    num_envs, steps, minibatches, seed, has_states = rollout
    pair = [fill_storage(kind, "rl", num_envs, steps, seed, has_states) for kind in (RolloutStorage, Original)]
    assert_same_batches(*(storage.recurrent_mini_batch_generator(minibatches, 2) for storage in pair))


@settings(max_examples=30, deadline=None)
@given(rollouts())
def test_the_steps_of_distillation_are_those_of_the_original(rollout: tuple[int, int, int, int, bool]) -> None:
    num_envs, steps, _, seed, has_states = rollout
    pair = [
        fill_storage(kind, "distillation", num_envs, steps, seed, has_states) for kind in (RolloutStorage, Original)
    ]
    assert_same_batches(*(storage.generator() for storage in pair))


@settings(max_examples=30, deadline=None)
@given(rollouts())
def test_an_epoch_has_the_rows_of_the_original_in_another_order(rollout: tuple[int, int, int, int, bool]) -> None:
    num_envs, steps, _, seed, has_states = rollout
    pair = [fill_storage(kind, "rl", num_envs, steps, seed, has_states) for kind in (RolloutStorage, Original)]
    ordered = []
    for storage in pair:
        (batch,) = storage.mini_batch_generator(1, 1)
        order = batch.actions[:, 0].argsort()
        ordered.append({name: [leaf[order] for leaf in list_tensors(value)] for name, value in vars(batch).items()})
    ours, original = ordered
    assert ours.keys() == original.keys()
    for name, others in original.items():
        for mine, other in zip(ours[name], others, strict=True):
            assert torch.equal(mine, other), name


@pytest.mark.parametrize("training", ["rl", "distillation"])
def test_the_attributes_are_those_of_the_original(training: str) -> None:
    ours, original = (fill_storage(kind, training, 3, 4, 0, True) for kind in (RolloutStorage, Original))
    for name, value in vars(original).items():
        mine = getattr(ours, name)
        if name in ("training_type", "device", "num_transitions_per_env", "num_envs", "actions_shape", "step"):
            assert mine == value, name
            continue
        for a, b in zip(list_tensors(mine), list_tensors(value), strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), name
            assert torch.equal(a, b), name
