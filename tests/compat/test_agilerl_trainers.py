# pyright: reportMissingImports=false
"""AgileRL's trainers on our buffers; trainers that make their buffers are patched."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from relive.compat import patch
from relive.compat.agilerl import BPTTSequenceType
from relive.compat.agilerl.components.replay_buffer import MultiStepReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer
from relive.compat.agilerl.components.rollout_buffer import RolloutBuffer

pytest.importorskip("agilerl", reason="needs AgileRL, which has an environment of its own: pip install agilerl==2.58.0")
pytest.importorskip("peft", reason="AgileRL's algorithms need peft: pip install peft")

# AgileRL itself raises warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

SETTINGS: dict[str, Any] = {"max_steps": 400, "evo_steps": 200, "eval_loop": 1, "wb": False, "verbose": False}


def agilerl(module: str) -> Any:
    """Import a module of AgileRL, or skip the test."""
    return importlib.import_module(f"agilerl.{module}")


@pytest.fixture
def patched() -> Iterator[None]:
    with patch("agilerl"):
        yield


def environments(name: str, num_envs: int = 4) -> Any:
    return agilerl("utils.utils").make_vect_envs(name, num_envs=num_envs)


def trained_off_policy(env: Any, name: str, memory: Any, n_step_memory: Any = None, **options: Any) -> Any:
    kind = getattr(agilerl("algorithms"), name)
    agent = kind(env.single_observation_space, env.single_action_space, batch_size=16, learn_step=4, **options)
    before = [parameter.clone() for parameter in agent.actor.parameters()]
    train = agilerl("training.train_off_policy").train_off_policy
    (agent,), _ = train(env, "", name, [agent], memory, n_step_memory=n_step_memory, **SETTINGS)
    env.close()
    assert any(not torch.equal(a, b) for a, b in zip(before, agent.actor.parameters(), strict=True))
    return agent


def test_dqn_trains() -> None:
    memory = ReplayBuffer(300)
    trained_off_policy(environments("CartPole-v1"), "DQN", memory)
    assert memory.is_full


def test_td3_trains() -> None:
    trained_off_policy(environments("Pendulum-v1"), "TD3", ReplayBuffer(300), vect_noise_dim=4)


def test_rainbow_updates_the_priorities_of_its_rows() -> None:
    memory, n_step_memory = PrioritizedReplayBuffer(300), MultiStepReplayBuffer(300, n_step=3, gamma=0.99)
    trained_off_policy(environments("CartPole-v1"), "RainbowDQN", memory, n_step_memory)
    assert len(memory) == len(n_step_memory) == 300
    tree = memory.sum_tree
    assert len({round(tree[i], 6) for i in range(300)}) > 50


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("recurrent", [False, True])
def test_ppo_trains_is_cloned_and_saved_with_our_buffer(recurrent: bool, tmp_path: Path) -> None:
    env = environments("CartPole-v1")
    options: dict[str, Any] = {"num_envs": 4, "learn_step": 64, "batch_size": 16, "update_epochs": 2}
    if recurrent:
        options |= {"recurrent": True, "max_seq_len": 8, "net_config": {"encoder_config": {"hidden_state_size": 8}}}
    agent = agilerl("algorithms.ppo").PPO(env.single_observation_space, env.single_action_space, **options)
    assert type(agent.rollout_buffer) is RolloutBuffer
    before = [parameter.clone() for parameter in agent.actor.parameters()]
    train = agilerl("training.train_on_policy").train_on_policy
    (agent,), _ = train(env, "", "PPO", [agent], **SETTINGS)
    env.close()
    assert any(not torch.equal(a, b) for a, b in zip(before, agent.actor.parameters(), strict=True))
    assert type(agent.clone().rollout_buffer) is RolloutBuffer
    agent.save_checkpoint(tmp_path / "agent.pt")
    assert type(type(agent).load(tmp_path / "agent.pt").rollout_buffer) is RolloutBuffer


@pytest.mark.usefixtures("patched")
def test_observations_are_normalised_in_our_buffer_by_its_wrapper() -> None:
    env = environments("CartPole-v1")
    agent = agilerl("algorithms.ppo").PPO(
        env.single_observation_space, env.single_action_space, num_envs=4, learn_step=64, batch_size=16
    )
    wrapped = agilerl("wrappers.agent").RSNorm(agent)
    (wrapped,), _ = agilerl("training.train_on_policy").train_on_policy(env, "", "PPO", [wrapped], **SETTINGS)
    env.close()
    assert np.isfinite(wrapped.agent.rollout_buffer.get()["observations"]).all()


def test_a_multi_agent_algorithm_trains() -> None:
    scenario: Any = pytest.importorskip("mpe2.simple_speaker_listener_v4", reason="needs mpe2, AgileRL's test scenario")
    vector = importlib.import_module("agilerl.vector.pz_async_vec_env").AsyncPettingZooVecEnv
    env = vector([lambda: scenario.parallel_env(continuous_actions=True)] * 2)
    env.reset()
    spaces = [[part(agent) for agent in env.agents] for part in (env.single_observation_space, env.single_action_space)]
    agent = agilerl("algorithms.maddpg").MADDPG(
        *spaces, agent_ids=env.agents, vect_noise_dim=2, batch_size=16, learn_step=20
    )
    memory = ReplayBuffer(1_000)
    train = agilerl("training.train_multi_agent_off_policy").train_multi_agent_off_policy
    train(env, "", "MADDPG", [agent], memory, **SETTINGS)
    env.close()
    assert len(memory) > 200


@pytest.mark.usefixtures("patched")
def test_a_population_is_made_with_our_buffer_and_evolves_with_it() -> None:
    env, hp = environments("CartPole-v1"), {"BATCH_SIZE": 8, "LEARN_STEP": 32}
    spaces = {"observation_space": env.single_observation_space, "action_space": env.single_action_space}
    create_population = agilerl("utils.utils").create_population
    pop = create_population("PPO", **spaces, net_config=None, INIT_HP=hp, population_size=2, num_envs=4)
    for agent in pop:
        agilerl("rollouts").collect_rollouts(agent, env, n_steps=8)
        agent.learn()
        agent.test(env, max_steps=4)
    mutate = agilerl("hpo.mutation").Mutations(0, 1, 0, 0, 0, 0, rand_seed=0).mutation
    pop = mutate(agilerl("hpo.tournament").TournamentSelection(2, True, 2).select(pop)[1])
    env.close()
    assert [type(agent.rollout_buffer) for agent in pop] == [RolloutBuffer] * 2


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize(
    ("algorithm", "kinds"),
    [
        ("DQN", (ReplayBuffer, type(None))),
        ("RainbowDQN", (PrioritizedReplayBuffer, MultiStepReplayBuffer)),
        ("PPO", (type(None), type(None))),
    ],
)
def test_a_trainer_of_specifications_makes_our_buffers(algorithm: str, kinds: tuple[type, type]) -> None:
    models, trainers = agilerl("models"), agilerl("training.trainer")
    by_priority = algorithm == "RainbowDQN"
    replay = models.ReplayBufferSpec(max_size=300, per_buffer=by_priority, n_step_buffer=by_priority)
    trainer = trainers.LocalTrainer(
        algorithm=algorithm,
        environment="CartPole-v1",
        training=models.TrainingSpec(max_steps=200, pop_size=2, evo_steps=100),
        replay_buffer=None if algorithm == "PPO" else replay,
    )
    assert (type(trainer.memory), type(trainer.n_step_memory)) == kinds
    if algorithm == "PPO":
        assert [type(agent.rollout_buffer) for agent in trainer.population] == [RolloutBuffer] * 2
        assert [type(agent.clone().rollout_buffer) for agent in trainer.population] == [RolloutBuffer] * 2
    else:
        assert trainer.memory.max_size == 300


def test_there_is_one_kind_of_sequences_with_the_documented_name() -> None:
    theirs = importlib.import_module("agilerl.typing").BPTTSequenceType
    assert BPTTSequenceType is theirs is importlib.import_module("relive.compat.agilerl.typing").BPTTSequenceType
    assert BPTTSequenceType.FIFTY_PERCENT_OVERLAPPING is theirs.FIFTY_PERCENT_OVERLAP
    assert list(BPTTSequenceType) == [theirs.CHUNKED, theirs.MAXIMUM, theirs.FIFTY_PERCENT_OVERLAP]


@pytest.mark.parametrize("masked", [False, True])
def test_a_buffer_that_agilerl_pickled_is_ours_where_it_is_patched(masked: bool) -> None:
    space, action = gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.Discrete(3)
    theirs = agilerl("components.rollout_buffer").RolloutBuffer(4, space, action, num_envs=2)
    mask: dict[str, Any] = {"action_mask": np.ones((2, 3))} if masked else {}
    for step in range(3):
        theirs.add(np.ones((2, 2)), np.zeros(2), np.full(2, step), np.zeros(2), np.zeros(2), np.zeros(2), **mask)
    pickled = pickle.dumps(theirs)
    with patch("agilerl"):
        ours = pickle.loads(pickled)
    assert type(ours) is RolloutBuffer
    np.testing.assert_array_equal(ours.get()["rewards"], theirs.get()["rewards"])
    ours.add(np.ones((2, 2)), np.zeros(2), np.full(2, 3), np.zeros(2), np.zeros(2), np.zeros(2), **mask)
    assert ours.get()["rewards"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
