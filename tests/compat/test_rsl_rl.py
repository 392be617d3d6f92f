"""rsl_rl's storage on our core: stored steps, minibatches and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import relive as rl
from relive.compat.rsl_rl import RolloutStorage
from relive.errors import NotReadyError, SchemaError

N, T = 3, 4


def make_obs(step: int) -> TensorDict:
    """Return two observation groups whose numbers are 10 · step + environment."""
    number = (10.0 * step + torch.arange(N)).unsqueeze(-1)
    return TensorDict({"policy": number.repeat(1, 2), "critic": -number}, [N])


def transition(step: int, done: tuple[int, ...] = (), *, state: bool = False) -> Any:
    """Return a step with action = step, value = 10 · step and reward = 100 · step."""
    made: Any = RolloutStorage.Transition()
    made.observations = make_obs(step)
    made.actions = torch.full((N, 2), float(step))
    made.rewards = torch.full((N,), 100.0 * step)
    made.dones = torch.zeros(N, dtype=torch.long).index_fill(0, torch.tensor(done, dtype=torch.long), 1)
    made.values = torch.full((N, 1), 10.0 * step)
    made.actions_log_prob = torch.full((N,), -float(step))
    made.distribution_params = (made.actions + 0.5, torch.ones(2).expand(N, 2))
    made.privileged_actions = made.actions + 7
    # Hidden states have two layers of three numbers: a pair for the actor's LSTM, a tensor for the critic's GRU.
    if state:
        each = made.observations["policy"][:, :1].expand(2, N, 3)
        made.hidden_states = ((each, each + 0.5), each + 1000)
    return made


def storage(kind: str = "rl", steps: int = T, **settings: Any) -> Any:
    made: Any = RolloutStorage(kind, N, T, make_obs(0), [2])
    for step in range(steps):
        made.add_transition(transition(step, **settings))
    return made


def test_steps_are_stored_under_the_names_of_rsl_rl() -> None:
    full = storage()
    assert full.step == T
    assert full.observations["critic"][2, :, 0].tolist() == [-20.0, -21.0, -22.0]
    assert full.observations.batch_size == (T, N)
    assert full.actions[:, 0, 0].tolist() == [0, 1, 2, 3]
    assert full.values[:, 1].tolist() == [[0], [10], [20], [30]]
    assert full.rewards[:, 1].tolist() == [[0], [100], [200], [300]]
    assert full.actions_log_prob[:, 1].tolist() == [[0], [-1], [-2], [-3]]
    mean, std = full.distribution_params
    assert mean[:, 2, 1].tolist() == [0.5, 1.5, 2.5, 3.5]
    assert std.eq(1).all()
    assert full.saved_hidden_state_a is None
    assert full.dones.shape == (T, N, 1)
    assert full.dones.dtype == torch.uint8


def test_the_core_stores_dones_and_rewards_of_rsl_rl_unchanged() -> None:
    made: Any = RolloutStorage("rl", N, T, make_obs(0), [2])
    for step in range(T):
        made.add_transition(transition(step, done=(1,) if step == 2 else ()))
    assert made.core["terminated"].tolist() == [[False] * 3, [False] * 3, [False, True, False], [False] * 3]
    assert not made.core["truncated"].any()
    made.core.check()


def test_every_attribute_exists_before_the_first_step_and_stays_the_memory() -> None:
    empty: Any = RolloutStorage("rl", N, T, make_obs(0), [2])
    held = {name: getattr(empty, name) for name in ("observations", "actions", "rewards", "dones", "values", "returns")}
    empty.actions[3] = 5
    for step in range(2):
        empty.add_transition(transition(step, state=step > 0))
    for name, attribute in held.items():
        assert getattr(empty, name) is attribute
    assert held["actions"][:, 0, 0].tolist() == [0, 1, 0, 5]
    held["rewards"][0] += 1
    held["observations"]["policy"][0] = -3
    held["dones"][1] = 1
    assert empty.core["reward"][0].tolist() == [[1.0]] * N
    assert empty.core["obs", "policy"][0].eq(-3).all()
    assert empty.core["terminated"].tolist() == [[False] * N, [True] * N]


@pytest.mark.parametrize("name", ["actions", "rewards", "dones", "values", "actions_log_prob", "returns", "advantages"])
def test_assigning_an_attribute_writes_the_memory(name: str) -> None:
    full = storage()
    memory = getattr(full, name)
    setattr(full, name, torch.ones_like(memory))
    assert getattr(full, name) is memory
    assert memory.eq(1).all()
    setattr(full, name, getattr(full, name) + 0)
    with pytest.raises(SchemaError, match=rf"{name}: expected shape .*, got \(1,\)"):
        setattr(full, name, torch.ones(1))


def test_nested_attributes_are_assigned_part_by_part() -> None:
    full = storage(state=True)
    full.observations = TensorDict({"policy": torch.ones(T, N, 2), "critic": torch.zeros(T, N, 1)}, [T, N])
    full.distribution_params = tuple(torch.full((T, N, 2), float(i)) for i in range(2))
    full.saved_hidden_state_a = [torch.full((T, 2, N, 3), float(i)) for i in range(2)]
    (batch,) = full.mini_batch_generator(1, 1)
    assert batch.observations["policy"].eq(1).all()
    assert [float(param.mean()) for param in batch.old_distribution_params] == [0, 1]
    (batch,) = full.recurrent_mini_batch_generator(1, 1)
    assert [float(part.mean()) for part in batch.hidden_states[0]] == [0, 1]
    with pytest.raises(SchemaError, match=r"observations: expected the keys \['critic', 'policy'\]"):
        full.observations = TensorDict({"policy": torch.ones(T, N, 2)}, [T, N])
    with pytest.raises(SchemaError, match="distribution_params: expected the keys"):
        full.distribution_params = None
    with pytest.raises(
        SchemaError, match="distribution_params: expected a field of this buffer, got one without memory"
    ):
        storage(steps=0).distribution_params = (torch.zeros(T, N, 2),)


def test_an_attribute_of_the_other_training_type_is_missing() -> None:
    assert not hasattr(storage(), "privileged_actions")
    assert not hasattr(storage("distillation"), "values")
    with pytest.raises(AttributeError, match="does not have it"):
        _ = storage("distillation").returns


def test_rows_left_out_of_one_epoch_appear_in_another() -> None:
    full = storage()
    drawn: set[float] = set()
    for _ in range(40):
        batches = list(full.mini_batch_generator(5, 1))
        assert [len(batch.actions) for batch in batches] == [2] * 5
        drawn |= {float(x) for batch in batches for x in batch.observations["policy"][:, 0]}
    assert len(drawn) == T * N


def orders(full: Any) -> list[list[float]]:
    return [batch.observations["policy"][:, 0].tolist() for batch in full.mini_batch_generator(1, 3)]


def test_epochs_are_shuffled_anew_and_repeat_after_torch_was_seeded() -> None:
    torch.manual_seed(5)
    full = storage()
    before = torch.random.get_rng_state()
    first = orders(full)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert len({tuple(order) for order in first}) == 3
    torch.manual_seed(5)
    assert orders(storage()) == first
    torch.rand(1)
    assert orders(storage()) != first


def test_only_stored_steps_are_read() -> None:
    part = storage(state=True)
    part.clear()
    part.add_transition(transition(7))
    (batch,) = part.mini_batch_generator(1, 1)
    assert batch.actions.eq(7).all()
    (batch,) = part.recurrent_mini_batch_generator(1, 1)
    assert batch.masks.shape == (1, N)
    assert batch.actions.shape == (1, N, 2)
    taught = storage("distillation", steps=2)
    assert [batch.privileged_actions[0, 0].item() for batch in taught.generator()] == [7, 8]


def trajectories(full: RolloutStorage, batch: Any) -> list[list[float]]:
    numbers = batch.observations["policy"][..., 0].T
    return [row[mask].tolist() for row, mask in zip(numbers, batch.masks.T, strict=True)]


def test_recurrent_minibatches_are_whole_environments_cut_at_their_ends() -> None:
    full: Any = RolloutStorage("rl", N, T, make_obs(0), [2])
    for step in range(T):
        full.add_transition(transition(step, done={1: (0,), 3: (2,)}.get(step, ()), state=True))
    first, second, third = full.recurrent_mini_batch_generator(3, 1)
    assert trajectories(full, first) == [[0, 10], [20, 30]]
    assert trajectories(full, second) == [[1, 11, 21, 31]]
    assert trajectories(full, third) == [[2, 12, 22, 32]]
    assert first.observations["policy"].shape == (T, 2, 2)
    assert first.observations["policy"][2:, 0].eq(0).all()
    (hidden, cell), critic = first.hidden_states
    assert hidden.shape == (2, 2, 3)
    assert hidden[0, :, 0].tolist() == [0, 20]
    assert cell[1, :, 2].tolist() == [0.5, 20.5]
    assert critic[1, :, 1].tolist() == [1000, 1020]
    assert second.actions[:, 0, 0].tolist() == [0, 1, 2, 3]
    assert second.old_distribution_params[0].shape == (T, 1, 2)


def test_step_can_be_set_after_rows_were_written_directly() -> None:
    empty = storage(steps=1)
    empty.actions[1], empty.dones[1] = 9, 2
    empty.step += 1
    assert empty.step == len(empty.core) // N == 2
    assert empty.dones[1].tolist() == [[1]] * N
    assert sorted({float(x) for batch in empty.mini_batch_generator(1, 1) for x in batch.actions[:, 0]}) == [0, 9]
    empty.add_transition(transition(2))
    empty.step = 0
    with pytest.raises(SchemaError, match="num_mini_batches: expected 1 to 0 .stored transitions., got 1. Add"):
        next(empty.mini_batch_generator(1))


def test_adding_to_a_full_storage_overflows() -> None:
    full = storage()
    with pytest.raises(OverflowError, match=r"add_transition: expected at most 4 transitions, got 5\."):
        full.add_transition(transition(4))
    full.clear()
    full.add_transition(transition(9))
    assert full.actions[:, 0, 0].tolist() == [9, 1, 2, 3]


BROKEN: dict[str, Callable[[Any], None]] = {
    "observations": lambda t: setattr(t, "observations", None),
    "rewards": lambda t: setattr(t, "rewards", None),
    "dones": lambda t: setattr(t, "dones", None),
    "values": lambda t: setattr(t, "values", torch.zeros(N)),
    "actions": lambda t: setattr(t, "actions", torch.zeros(1, 2)),
    "distribution_params_1": lambda t: setattr(t, "distribution_params", (t.actions, torch.ones(N, 3))),
    "observations.critic": lambda t: t.observations.set("critic", torch.zeros(N, 3)),
}


@pytest.mark.parametrize("field", BROKEN)
@pytest.mark.parametrize("steps", [1, 2])
def test_a_step_that_does_not_fit_is_refused_and_changes_nothing(field: str, steps: int) -> None:
    part = storage(steps=steps)
    before = part.core.columns.clone()
    broken = transition(steps)
    BROKEN[field](broken)
    with pytest.raises(SchemaError, match=rf"^{field}: "):
        part.add_transition(broken)
    assert part.step == steps
    assert (part.core.columns == before).all()


def test_a_refused_first_step_declares_no_fields() -> None:
    empty = storage(steps=0)
    broken = transition(0)
    broken.distribution_params, broken.actions = (torch.zeros(N, 5),), torch.zeros(1, 2)
    with pytest.raises(SchemaError, match="actions: "):
        empty.add_transition(broken)
    assert not empty.distribution_params
    empty.add_transition(transition(0))
    assert [param.shape for param in empty.distribution_params] == [(T, N, 2)] * 2


def test_columns_and_floats_are_accepted_as_in_rsl_rl() -> None:
    lenient, full = storage(steps=0), storage(steps=1)
    given = transition(0)
    given.rewards, given.dones, given.actions_log_prob = (
        given.rewards[:, None],
        given.dones.float()[:, None],
        given.values,
    )
    given.actions = given.actions.double()
    lenient.add_transition(given)
    assert (lenient.core.columns == full.core.columns).all()


def test_a_tensor_with_a_gradient_is_stored_without_it() -> None:
    part = storage(steps=1)
    step = transition(1)
    step.values = step.values.requires_grad_()
    part.add_transition(step)
    assert not part.core["value"].requires_grad
    assert part.values[1].eq(10).all()


def test_a_storage_without_distribution_parameters_works() -> None:
    plain = storage(steps=0)
    step = transition(1)
    step.distribution_params = None
    plain.add_transition(step)
    (batch,) = plain.mini_batch_generator(1, 1)
    assert batch.old_distribution_params == ()


@pytest.mark.parametrize("read", ["mini_batch_generator", "recurrent_mini_batch_generator"])
def test_generators_refuse_the_other_training_type_and_too_many_minibatches(read: str) -> None:
    with pytest.raises(ValueError, match=f"{read}: expected training_type 'rl', got 'distillation'"):
        next(getattr(storage("distillation"), read)(1))
    with pytest.raises(ValueError, match="num_mini_batches: expected 1 to .*, got 13. Pass fewer mini-batches"):
        next(getattr(storage(), read)(13))
    with pytest.raises(ValueError, match="generator: expected training_type 'distillation'"):
        next(storage().generator())
    with pytest.raises(ValueError, match='training_type: expected "rl" or "distillation", got \'sl\''):
        storage("sl")


def test_an_empty_storage_has_no_trajectories() -> None:
    with pytest.raises((NotReadyError, SchemaError)):
        next(storage(steps=0).recurrent_mini_batch_generator(1))


def test_a_storage_filled_in_inference_mode_is_trained_on_outside_it() -> None:
    made: Any = RolloutStorage("rl", N, T, make_obs(0), [2])
    with torch.inference_mode():
        for step in range(T):
            made.add_transition(transition(step))
        made.returns[0] = made.values[1] + 1
        made.advantages = made.returns - made.values
    weight = torch.ones(1, requires_grad=True)
    for batch in made.mini_batch_generator(2, 1):
        ((batch.values * weight - batch.returns) ** 2).mean().backward()
    made.values[0] += 1
    assert weight.grad is not None
    assert made.returns[0].eq(11).all()


def make_rollout_with_time_out_values(gamma: float, ends: torch.Tensor, time_outs: torch.Tensor) -> Any:
    """Return a rollout whose rewards include the discounted values of timed-out steps, as in rsl_rl's PPO."""
    made: Any = RolloutStorage("rl", N, T, make_obs(0), [2])
    for step in range(T):
        each = transition(step)
        each.dones = ends[step] | time_outs[step]
        each.rewards = each.rewards + gamma * (each.values.squeeze(1) * time_outs[step])
        made.add_transition(each)
    return made


def test_rewards_with_time_out_values_equal_the_option_own_value() -> None:
    gamma, lam = 0.9, 0.8
    ends, time_outs = torch.zeros(2, T, N, dtype=torch.bool)
    ends[1, 0] = time_outs[2, 1] = time_outs[3, 2] = True
    folded = make_rollout_with_time_out_values(gamma, ends, time_outs)
    last = torch.full((N, 1), 40.0)
    folded.core.compute_advantage(last, gamma=gamma, lam=lam)

    direct = rl.RolloutBuffer(T, N, obs={"policy": 2, "critic": 1}, action=2, reward=(1,), value=(1,))
    for step in range(T):
        each = transition(step)
        rewards, values = each.rewards[:, None], each.values
        direct.add(each.observations, each.actions, rewards, ends[step], time_outs[step], value=values)
    direct.compute_advantage(last, gamma=gamma, lam=lam, bootstrap_truncated="own_value")
    assert torch.allclose(folded.core["advantage"], direct["advantage"])
    assert torch.allclose(folded.core["return"], direct["return"])
