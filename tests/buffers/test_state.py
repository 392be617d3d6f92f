"""`state` and `load_state`: memory stays in place for the native core, and numbers are verified first."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.multiprocessing import reductions

import relive as rl
from tests.faults.digest import digest
from tests.tiers import select
from tests.totals import SEED, tell, trials

SAMPLERS: dict[str, Any] = {
    "uniform": rl.Uniform(),
    "prioritized": rl.Prioritized(),
    "without": rl.WithoutReplacement(),
    "counted": rl.Counted(rl.Prioritized()),
}


def make_buffer(sampler: Any = None, seed: int = 0) -> rl.ReplayBuffer:
    stats, extra = rl.EpisodeStats(2, window=3), {"on": rl.Field((), torch.bool)}
    norm: dict[Any, rl.RunningNorm] = {"obs": rl.RunningNorm(2)}
    return rl.ReplayBuffer(16, 2, (), num_envs=2, extra=extra, sampler=sampler, stats=stats, norm=norm, seed=seed)


def add_steps(replay: rl.ReplayBuffer, steps: int = 13, start: int = 0) -> rl.ReplayBuffer:
    for t in range(start, start + steps):
        obs, ends = np.full((2, 2), float(t), np.float32), np.array([t % 5 == 4, t % 7 == 6])
        then = obs + np.where(ends, 100, 1)[:, None].astype(np.float32)
        replay.add(obs, [0.5, 0.5], [1.0, 2.0], ends, np.zeros(2, np.bool_), then, on=ends)
    return replay


def iterate_tensors(state: Any) -> Iterator[torch.Tensor]:
    for value in state.values() if isinstance(state, dict | TensorDict) else state if isinstance(state, tuple) else ():
        yield from (value,) if isinstance(value, torch.Tensor) else iterate_tensors(value)


MOVES: dict[str, Callable[[Any], Any]] = {
    "share_memory_": lambda state: [tensor.share_memory_() for tensor in iterate_tensors(state)],
    "a queue": reductions.reduction.ForkingPickler.dumps,
}


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
@pytest.mark.parametrize("part", ["columns", "state_dict"])
@pytest.mark.parametrize("sampler", select("without", "counted", of=SAMPLERS))
def test_moving_a_returned_state_leaves_the_buffer_unchanged(
    sampler: str, part: str, move: Callable[[Any], Any]
) -> None:
    replay, calm = (add_steps(make_buffer(SAMPLERS[sampler])) for _ in range(2))
    returned_state = replay.columns if part == "columns" else replay.state_dict()
    assert next(iterate_tensors(returned_state)).data_ptr() == replay.storage.rows.leaves[0].data_ptr()
    moved = move(returned_state)
    new_tensors = [torch.full_like(tensor, 1) for tensor in iterate_tensors(returned_state) for _ in range(20)]
    for one in (replay, calm):
        add_steps(one, 30, start=13)
        one.check()
    for mine, other in zip(iterate_tensors(replay.state_dict()), iterate_tensors(calm.state_dict()), strict=True):
        assert torch.equal(mine, other)
    assert torch.equal(replay.sample(8)["obs"], calm.sample(8)["obs"])
    del moved, new_tensors, returned_state
    replay.check()


def forge_state(change: Callable[[dict[str, Any]], Any], sampler: Any = None) -> dict[str, Any]:
    state = copy.deepcopy(add_steps(make_buffer(sampler, seed=1), 9).state_dict())
    change(state)
    return state


def set_first_item(part: str, name: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    def change(state: dict[str, Any]) -> None:
        state[part][name].view(-1)[0] = value

    return change


def replace_entry(name: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda state: state.update({name: value})


def set_values(part: str, **changed: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda state: state["values"][part].update(changed)


def stage_leaves(state: dict[str, Any], *leaves: torch.Tensor) -> None:
    state["values"]["staged"]["names"] = ["obs"]
    state["arrays"].update({f"staged.obs.{i}": leaf for i, leaf in enumerate(leaves)})


FORGED: dict[str, tuple[Any, Callable[[dict[str, Any]], Any]]] = {
    "a negative head": (None, set_first_item("arrays", "ring.head", -100_000)),
    "a head beyond all ids": (None, set_first_item("arrays", "ring.head", 2**63 - 1)),
    "a head before the floor": (None, set_first_item("arrays", "ring.floor", 1000)),
    "a kind that is none": (None, set_first_item("arrays", "ring.kind", 9)),
    "a count of nothing": (None, set_first_item("arrays", "ring.count", 3)),
    "an open episode that is none": (None, set_first_item("arrays", "ring.open", False)),
    "an end in the middle of an episode": (None, set_first_item("rows", "column3", True)),
    "no arrays": (None, lambda state: state.pop("arrays")),
    "something more": (None, replace_entry("more", 1)),
    "no state": (None, lambda state: state.clear()),
    "another sampler": ("prioritized", lambda s: s.update(add_steps(make_buffer(rl.Uniform())).state_dict())),
    "a sparse tensor": (None, lambda s: s["rows"].update(column0=torch.zeros(9, 2, 2).to_sparse())),
    "a tensor without values": (None, lambda s: s["arrays"].update({"ring.head": torch.zeros(2, device="meta")})),
    "another capacity": (None, lambda s: s["config"].update(capacity=18)),
    "an array more": (None, lambda s: s["arrays"].update(more=torch.zeros(1))),
    "a column more": (None, lambda s: s["rows"].update(column9=torch.zeros(1))),
    "no tensors": (None, replace_entry("rows", {"column0": 1})),
    "no dict of tensors": (None, replace_entry("rows", 7)),
    "draws of another sampler": (None, lambda s: s["arrays"].update({"sampler.mass": torch.zeros(3)})),
    "no arrays at all": (None, replace_entry("arrays", None)),
    "an infinite largest priority": ("prioritized", set_first_item("arrays", "sampler.largest", float("inf"))),
    "a largest priority that is no number": ("prioritized", set_first_item("arrays", "sampler.largest", float("nan"))),
    "an infinite priority": ("prioritized", set_first_item("arrays", "sampler.mass", float("inf"))),
    "a negative priority": ("prioritized", set_first_item("arrays", "sampler.mass", -1.0)),
    "a priority where there is no row": ("prioritized", lambda state: state["arrays"]["sampler.mass"].fill_(1.0)),
    "priorities of fewer slots": (
        "prioritized",
        lambda s: s["arrays"].update({"sampler.mass": torch.zeros(3).double()}),
    ),
    "a negative number of draws": ("prioritized", set_first_item("arrays", "sampler.draws", -1)),
    "a row twice in an epoch": ("without", lambda s: s["arrays"].update({"sampler.ids": torch.tensor([14, 14])})),
    "a row that never was": ("without", lambda s: s["arrays"].update({"sampler.ids": torch.tensor([10**9])})),
    "a negative row": ("without", lambda s: s["arrays"].update({"sampler.ids": torch.tensor([-7])})),
    "a negative count of draws": ("counted", set_first_item("arrays", "sampler.drawn", -1)),
    "an even increment": (None, set_values("random", inc="2")),
    "a state of too many bits": (None, set_values("random", state=str(1 << 200))),
    "a word of too many bits": (None, set_values("random", uinteger=1 << 40)),
    "a generator of a device that is none": (None, set_values("random", devices=["cuda:99"])),
    "no generator": (None, lambda s: s["values"].update(random=3)),
    "staged fields that are none": (None, set_values("staged", names=["colour"])),
    "staged fields of another shape": (None, lambda s: stage_leaves(s, torch.zeros(3))),
    "too many staged leaves": (None, lambda s: stage_leaves(s, torch.zeros(2, 2), torch.zeros(2, 2))),
    "staged fields that are no leaves": (None, set_values("staged", names=["obs"])),
    "no staged fields": (None, lambda s: s["values"].pop("staged")),
    "more episodes than steps": (None, set_first_item("arrays", "listeners.stats.counts", 10**6)),
    "a norm of half a row": (None, set_first_item("arrays", "listeners.norm0.count", 0.5)),
    "no statistics": (None, lambda s: s["arrays"].pop("listeners.stats.ring")),
}


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("sampler", "change"), FORGED.values(), ids=FORGED)
def test_an_impossible_state_is_refused_completely(
    sampler: str | None, change: Callable[[dict[str, Any]], Any]
) -> None:
    chosen = None if sampler is None else SAMPLERS[sampler]
    replay = add_steps(make_buffer(chosen))
    replay.sample(3)
    before = digest(replay)
    with pytest.raises(rl.SchemaError, match="expected"):
        replay.load_state_dict(forge_state(change, chosen))
    assert digest(replay) == before
    add_steps(replay, 20, start=13).check()


def test_changing_a_loaded_state_does_not_change_the_buffer() -> None:
    for sampler in SAMPLERS.values():
        source, replay = add_steps(make_buffer(sampler)), make_buffer(sampler)
        source.sample(3)
        source.stage(obs=np.ones((2, 2)))
        state = copy.deepcopy(source.state_dict())
        replay.load_state_dict(state)
        before = digest(replay)
        for tensor in iterate_tensors(state):
            tensor.zero_()
        assert digest(replay) == before


@pytest.mark.filterwarnings("ignore:obs. expected steps that start where")
@pytest.mark.parametrize("usual", select(40, of=[40, 150]))
def test_states_with_random_numbers_load_or_change_nothing(usual: int) -> None:
    random, loaded, count = np.random.default_rng(SEED), 0, trials("STATES", usual)
    numbers = [0, 1, 2, 3, 5, 16, 17, 255, -1, -100_000, 2**31, 2**53, 2**62, 2**63 - 1, -(2**63)]
    for trial in range(count):
        chosen = list(SAMPLERS.values())[trial % len(SAMPLERS)]
        replay, state = (
            add_steps(make_buffer(chosen)),
            copy.deepcopy(add_steps(make_buffer(chosen, seed=1), 9).state_dict()),
        )
        for _ in range(int(random.integers(1, 3))):
            tensor = list(iterate_tensors(state))[int(random.integers(len(list(iterate_tensors(state)))))]
            flat = tensor.view(-1)
            if not len(flat):
                continue
            if tensor.dtype == torch.int64:
                flat[int(random.integers(len(flat)))] = numbers[int(random.integers(len(numbers)))]
            else:
                some = flat[int(random.integers(len(flat))) :][:1].view(torch.uint8)
                some.copy_(torch.from_numpy(random.integers(0, 256, len(some)).astype(np.uint8)))
        before = digest(replay)
        try:
            replay.load_state_dict(state)
        except rl.SchemaError:
            assert digest(replay) == before
        else:
            loaded += 1
        add_steps(replay, 5, start=13)
        replay.check()
    tell(f"states: {count} with random numbers, {loaded} loaded and lived on, the others refused whole")


@pytest.mark.parametrize("envs", [1, 3])
def test_a_ring_with_changed_numbers_stays_inside_its_memory(envs: int) -> None:
    """The tensors of a state share the buffer's memory; no number in them may cause access outside the columns."""
    random = np.random.default_rng(SEED)
    hostile = [-(2**63), -(2**63) + 1, -(2**62), -100_000, -1, 0, 7, 10**12, 2**62, 2**63 - 2, 2**63 - 1]
    for _ in range(trials("HEADS", 60)):
        sampler = [rl.Uniform(), rl.Prioritized()][int(random.integers(2))]
        stored = bool(random.integers(2))
        replay = rl.ReplayBuffer(
            9 * envs, 2, (), num_envs=envs, sampler=sampler, next_obs="stored" if stored else "shared",
            autoreset=["NEXT_STEP", "SAME_STEP"][int(random.integers(2))], seed=0,
        )  # fmt: skip
        obs, flags = np.zeros((envs, 2), np.float32), np.zeros(envs, np.bool_)
        for t in range(4):
            replay.add(obs + t, np.zeros(envs), np.zeros(envs), flags, flags, obs + t + 1)
        ring = replay.state_dict()["arrays"]
        for name in ("head", "floor", "count"):
            tensor = ring[f"ring.{name}"]
            for env in range(envs):
                if random.random() < 0.7:
                    tensor[env] = hostile[int(random.integers(len(hostile)))]
        if random.random() < 0.5:
            ring["ring.kind"].copy_(torch.from_numpy(random.integers(0, 8, ring["ring.kind"].shape).astype(np.uint8)))
        for t in range(4, 29):
            replay.add(obs + t, np.zeros(envs), np.zeros(envs), flags, flags, obs + t + 1)
            for view in (None, rl.Transition() if stored else rl.Sequence(3, burn_in=2)):
                try:
                    replay.sample(4, view)
                except (rl.NotReadyError, IndexError, ValueError):
                    continue


def test_a_save_after_a_state_was_loaded_has_none_of_the_rows_before(tmp_path: Path) -> None:
    def filled(rows: int, reward: float) -> rl.ReplayBuffer:
        replay = rl.ReplayBuffer(20, obs=1, action=(), seed=0)
        for t in range(rows):
            replay.add([t], 0.0, reward, False, False, [t + 1])
        return replay

    replay = filled(10, 100.0)
    replay.save(tmp_path)
    replay.load_state_dict(filled(12, 500.0).state_dict())
    replay.save(tmp_path)
    again = rl.load(tmp_path, rl.ReplayBuffer)
    assert again[again.ids()]["reward"].tolist() == [500.0] * 12
