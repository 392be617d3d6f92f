"""Sampling from shards equals sampling from one buffer: the same rows, probabilities and weights."""

import pytest

pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")

from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch

import relive as rl
from relive.distributed import ReplayService
from relive.errors import NotReadyError, PriorityError, SchemaError
from relive.storage.allocator import supports_persistent_memory
from tests.distributed.local import LocalCalls, local_service, make_client, make_plan, make_steps

ENVS, SHARDS, STEPS = 7, 3, 12


@pytest.fixture(params=["in place", "by calls"], autouse=True)
def near(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether clients read shards in place; each test runs with both values."""
    if request.param == "in place" and not supports_persistent_memory():
        pytest.skip("needs Linux and the native core")
    monkeypatch.setattr(LocalCalls, "near", request.param == "in place")
    return LocalCalls.near


def filled(sampler: rl.Prioritized | rl.Uniform) -> tuple[ReplayService, LocalCalls, rl.ReplayBuffer]:
    """Return a service and a buffer with the same rows; environment 6 has a third as many as the others."""
    service, calls = local_service(make_plan(700, ENVS, SHARDS, sampler=sampler))
    single = rl.ReplayBuffer(700, 2, (), num_envs=ENVS, sampler=sampler, seed=0)
    for envs, steps in ((list(range(ENVS)), STEPS // 3), (list(range(ENVS - 1)), 2 * STEPS)):
        block = make_steps(envs, 0, steps, length=5)
        for memory in (service, single):
            memory.extend(block, env_ids=envs)
    service.flush()
    return service, calls, single


def prioritized(
    normalize: Literal["batch", "global"], alpha: float = 0.7, scale: float = 1.0
) -> tuple[ReplayService, rl.ReplayBuffer, dict[int, float]]:
    """Return a service and a buffer with priorities that differ by orders of magnitude, also between shards."""
    sampler = rl.Prioritized(alpha, beta=lambda drawn: min(1.0, 0.4 + drawn / 1e5), normalize=normalize)
    service, _, single = filled(sampler)
    ids = single.ids()
    priority = scale * 10.0 ** np.random.default_rng(0).uniform(-1, 1, len(ids)) * (1 + (ids.numpy() % ENVS))
    for memory in (service, single):
        assert memory.update_priority(ids, priority) == 0
    return service, single, dict(zip(ids.tolist(), ((priority + 1e-6) ** alpha).tolist(), strict=True))


@pytest.mark.parametrize("sampler", [rl.Uniform(), rl.Prioritized()])
def test_a_row_has_the_id_and_the_content_it_has_in_one_buffer(sampler: rl.Uniform | rl.Prioritized) -> None:
    service, _, single = filled(sampler)
    assert len(service) == len(single)
    for view in (rl.Transition(), rl.NStep(3, 0.9), rl.Window(obs=(-1, 0), action=range(3)), rl.Sequence(4, burn_in=2)):
        batch = service.sample(500, view)
        expected = single.read(batch["index"], view)
        assert set(batch.keys()) == set(expected.keys()) | ({"weight"} if sampler != rl.Uniform() else set())
        for name in expected.keys():
            assert torch.equal(batch[name], expected[name]), name
    assert batch["mask"][:, 0].all()
    assert set(service.sample(5000)["index"].tolist()) == set(single.ids().tolist())


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Return the deviation from the expectation, in standard deviations."""
    degrees = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees))


def drawn(service: ReplayService, ids: np.ndarray, batches: int) -> np.ndarray:
    index = np.concatenate([service.sample(256)["index"].numpy() for _ in range(batches)])
    return np.array([(index == i).sum() for i in ids])


def test_uniform_rows_are_equally_likely_in_shards_of_unequal_size() -> None:
    service, calls, single = filled(rl.Uniform())
    assert len({shard.totals().rows for shard in calls.shards}) > 1
    ids = single.ids().numpy()
    counts = drawn(service, ids, 200)
    assert abs(chi_square(counts, np.full(len(ids), 200 * 256 / len(ids)))) < 4


def test_prioritized_rows_are_drawn_in_proportion_to_their_priority_among_all_shards() -> None:
    service, _, mass = prioritized("batch")
    ids, p = np.array(list(mass)), np.array(list(mass.values()))
    counts = drawn(service, ids, 400)
    # Draws are stratified within a shard, which has less noise than independent draws.
    assert chi_square(counts, 400 * 256 * p / p.sum()) < 4
    # Shares by number of rows instead of mass would be far off.
    by_rows = p.copy()
    for shard in range(SHARDS):
        mine = service.plan.find_shards(ids % ENVS) == shard
        by_rows[mine] *= mine.sum() / by_rows[mine].sum()
    assert chi_square(counts, 400 * 256 * by_rows / by_rows.sum()) > 100


@pytest.mark.parametrize("normalize", ["batch", "global"])
def test_weights_are_those_of_one_buffer(normalize: Literal["batch", "global"]) -> None:
    service, single, mass = prioritized(normalize)
    p = np.array(list(mass.values()))
    everything = (len(single) * p / p.sum()) ** -1.0
    batches = [service.sample(256), *islice(service.batches(256, ahead=3), 5)]
    for number, batch in enumerate(batches):
        beta = 0.4 + number * 256 / 1e5
        rows = np.array([mass[i] for i in batch["index"].tolist()])
        weight = (len(single) * rows / p.sum()) ** -beta
        weight /= weight.max() if normalize == "batch" else (everything**beta).max()
        assert np.allclose(batch["weight"].numpy(), weight, rtol=1e-6, atol=0)
        assert batch["weight"].dtype == torch.float32


def test_new_rows_get_the_largest_priority_that_any_shard_has_accepted() -> None:
    service, calls, _ = filled(rl.Prioritized(alpha=1.0, eps=0.0))
    service.update_priority(torch.tensor([0]), torch.tensor([50.0]))
    service.extend(make_steps([6], 100, 1), env_ids=[6])
    service.flush()
    totals = calls.shards[2].totals()
    assert totals.mass[0] * 2.0 ** totals.mass[1] == pytest.approx(totals.rows - 1 + 50.0)
    service.clear()
    service.extend(make_steps([6], 200, 1), env_ids=[6])
    service.flush()
    assert calls.shards[2].totals()[1] == (0.5, 1)


@pytest.mark.parametrize("scale", [1e-307, 1e306])
def test_priorities_at_the_ends_of_the_numbers_are_drawn_in_proportion(scale: float) -> None:
    service, _, mass = prioritized("batch", alpha=1.0, scale=scale)
    ids = np.array(list(mass))
    relative = np.array([value / scale for value in mass.values()])
    if scale < 1:
        relative[:] = 1.0
    counts = drawn(service, ids, 100)
    assert chi_square(counts, 100 * 256 * relative / relative.sum()) < 4


def test_a_row_without_priority_is_never_drawn_and_all_without_are_refused() -> None:
    service, _, single = filled(rl.Prioritized(alpha=1.0, eps=0.0))
    ids = single.ids()
    service.update_priority(ids, torch.where(ids % ENVS == 5, 1.0, 0.0))
    batch = service.sample(300)
    assert set((batch["index"] % ENVS).tolist()) == {5}
    service.update_priority(ids, torch.zeros(len(ids)))
    with pytest.raises(NotReadyError, match="a row of positive priority"):
        service.sample(1)


def test_a_priority_that_cannot_be_changes_nothing_in_any_shard() -> None:
    service, calls, single = filled(rl.Prioritized())
    before = [shard.totals() for shard in calls.shards]
    ids = single.ids()
    for bad in (float("nan"), -1.0, float("inf")):
        priority = torch.ones(len(ids))
        priority[-1] = bad
        with pytest.raises(PriorityError, match="priority"):
            service.update_priority(ids, priority)
    assert before == [shard.totals() for shard in calls.shards]
    with pytest.raises(SchemaError, match="a sampler with priorities"):
        filled(rl.Uniform())[0].update_priority(ids, torch.ones(len(ids)))


def test_batches_are_asked_for_together_and_drawn_one_by_one(near: bool) -> None:
    service, calls, single = filled(rl.Uniform())
    calls.calls.clear()
    batches = service.batches(32, rl.NStep(2, 0.9), ahead=5)
    for _ in range(10):
        batch = next(batches)
        expected = single.read(batch["index"], rl.NStep(2, 0.9))
        assert torch.equal(batch["reward"], expected["reward"])
        assert len({int(i) // ENVS for i in batch["index"]}) > 5
    batches.close()
    assert calls.calls.count("draw") in ((0,) if near else (2 * SHARDS, 3 * SHARDS))
    with pytest.raises(SchemaError, match="ahead"):
        next(service.batches(32, ahead=0))


def test_a_seed_gives_the_same_batches() -> None:
    batches = [[filled(rl.Prioritized())[0].sample(8)["index"].tolist() for _ in range(2)] for _ in range(2)]
    assert batches[0] == batches[1]


@pytest.mark.filterwarnings("ignore:obs. expected steps that start where")
@pytest.mark.parametrize("mode", ["NEXT_STEP", "DISABLED"])
def test_a_writer_sends_steps_as_one_buffer_takes_them(mode: str) -> None:
    plan = make_plan(200, 4, 2, autoreset=mode, extra={"note": ()})
    service, _ = local_service(plan)
    single = rl.ReplayBuffer(200, 2, (), num_envs=4, autoreset=mode, extra={"note": ()})
    envs = [1, 2]
    with service.writer(envs, block=4) as writer:
        for step in range(11):
            block = {name: value[0] for name, value in make_steps(envs, step, 1, length=5).items()}
            obs, action = block["obs"], block["action"]
            result = (block["next_obs"], block["reward"], block["terminated"], block["truncated"], {})
            for memory in (writer, single):
                more = {"env_ids": envs} if memory is single else {}
                memory.add_step(obs, action, result, note=np.full(2, step), **more)
            if mode == "DISABLED":
                assert len(service) == step // 4 * 4 * 2
    assert len(service) == len(single)
    batch = service.sample(200)
    expected = single.read(batch["index"])
    for name in expected.keys():
        assert torch.equal(batch[name], expected[name]), name
    with pytest.raises(SchemaError, match="further fields"):
        service.writer(envs).add(0, 0, 0, 0, 0, 0)


def test_what_does_not_fit_is_refused_before_it_is_sent() -> None:
    service, calls = local_service(make_plan(40, 4, 2))
    block = make_steps(range(4), 0, 3)
    for change, match in (
        ({"reward": block["reward"][:, :2]}, "reward"),
        ({"obs": block["obs"][..., :1]}, "obs"),
        ({"terminated": block["terminated"].astype(np.float32)}, "terminated"),
        ({"surplus": block["reward"]}, "the fields"),
    ):
        with pytest.raises(SchemaError, match=match):
            service.extend({**block, **change})
    with pytest.raises(IndexError, match="env_ids"):
        service.extend(block, env_ids=[1, 2, 3, 4])
    assert "push" not in calls.calls
    for wrong in ({"num_shards": 5}, {"sampler": rl.WithoutReplacement()}, {"capacity": 41}):
        with pytest.raises(SchemaError, match=next(iter(wrong))):
            make_plan(**{"capacity": 40, "num_envs": 4, **wrong})


class SlowCalls(LocalCalls):
    """Calls that store blocks only when the client waits for the answer."""

    def start_call(self, shard: int, method: str, *arguments: Any) -> Any:
        def arrive() -> Any:
            return super(SlowCalls, self).start_call(shard, method, *arguments)

        return arrive if method == "push" else arrive()

    def has_answer(self, ref: Any) -> bool:
        return False

    def fetch_answer(self, shard: int, ref: Any, deadline: float) -> Any:
        return super().fetch_answer(shard, ref() if callable(ref) else ref, deadline)


def test_rows_that_are_under_way_are_waited_for_before_an_empty_memory_is_refused() -> None:
    plan = make_plan(40, 4, 2)
    service = make_client(SlowCalls(plan), plan)
    with pytest.raises(NotReadyError, match="at least 1 stored transition, got 0"):
        service.sample(1)
    service.extend(make_steps(range(4), 0, 3))
    assert service.sample(8)["obs"].shape == (8, 2)


@pytest.mark.thorough
def test_several_threads_of_a_client_sample_and_update_at_once() -> None:
    service, _, _ = filled(rl.Prioritized())

    def learn() -> int:
        batches = [service.sample(4) for _ in range(300)]
        return sum(service.update_priority(batch["index"], torch.ones(4)) for batch in batches)

    with ThreadPoolExecutor(4) as pool:
        assert [running.result() for running in [pool.submit(learn) for _ in range(4)]] == [0] * 4


class PatientCalls(LocalCalls):
    """Calls whose answers have arrived at the second check."""

    def has_answer(self, ref: Any) -> bool:
        self.asked = getattr(self, "asked", 0) + 1
        return self.asked > 1


def test_blocks_that_wait_are_sent_while_their_client_only_samples() -> None:
    plan = make_plan(400, 2)
    service = make_client(PatientCalls(plan), plan, max_pending=16)
    for block in range(6):
        service.extend(make_steps(range(2), 10 * block, 10))
    service.sample(1)
    assert service.stats()["pending"] > 0
    for _ in range(3):
        service.sample(1)
    assert len(service) == 120
