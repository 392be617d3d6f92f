"""Random steps of any fields for several replay buffers, and a comparison of the stored rows, bit for bit."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

import relive as rl

VIEWS = (
    rl.Transition(), rl.NStep(1, 0.9), rl.NStep(3, 0.9), rl.NStep(9, 0.5), rl.Sequence(3), rl.Sequence(4, 2),
    rl.Sequence(3, 2, cross_episodes=True), rl.Sequence(20, 9, cross_episodes=True),
)  # fmt: skip


class Shape(NamedTuple):
    """The arguments of a replay buffer."""

    obs: Any
    rows: int
    num_envs: int | None
    options: dict[str, Any]
    """Further arguments of the buffer."""

    def buffer(self, **more: Any) -> rl.ReplayBuffer:
        capacity = self.rows * (self.num_envs or 1)
        return rl.ReplayBuffer(capacity, self.obs, num_envs=self.num_envs, **{"action": 2, **self.options, **more})


class Recorder:
    """Makes random steps of a buffer's fields: some episodes end, and some observations do not continue."""

    def __init__(self, replay: rl.ReplayBuffer, seed: int, follow: float = 0.8, end: float = 0.2) -> None:
        self._schema, self._random = replay._schema, torch.Generator().manual_seed(seed)
        self._num_envs, self._follow, self._end = replay.num_envs or 1, follow, end
        self._next_step = replay.storage.rows.next_step
        self._obs = {i: self._first(i) for i in self._schema.leaf_indices["obs"]}
        """Next observation of each environment [N, …]; stacks are [N, k, …]."""
        self._resetting = torch.zeros(self._num_envs, dtype=torch.bool)

    def clear(self) -> None:
        """Start a new episode in every environment that is not about to reset."""
        self.restart((~self._resetting).nonzero().squeeze(1).tolist())

    def restart(self, envs: list[int] | None) -> None:
        """Start a new episode in these environments."""
        at = torch.arange(self._num_envs) if envs is None else torch.tensor(envs, dtype=torch.int64)
        self._resetting[at] = False
        for leaf, state in self._obs.items():
            state[at] = self._first(leaf)[at]

    def block(self, steps: int, envs: list[int]) -> dict[Any, torch.Tensor]:
        """Return random steps of K environments, as leaves [steps, K, …] by path."""
        made = [self._step(torch.tensor(envs)) for _ in range(steps)]
        return {path: torch.stack([step[path] for step in made]) for path in made[0]}

    def _step(self, at: torch.Tensor) -> dict[Any, torch.Tensor]:
        schema, resets = self._schema, self._resetting[at]
        jumps = (torch.rand(len(at), generator=self._random) > self._follow) & ~resets
        self.restart(at[jumps].tolist())
        ends = (torch.rand((2, len(at)), generator=self._random) < self._end / 2) & ~resets
        step: dict[Any, torch.Tensor] = {}
        for i, (path, field) in enumerate(zip(schema.paths, schema.fields, strict=True)):
            if path[0] == "obs":
                step[path], step[("next_obs", *path[1:])] = self._moved(i, at, resets)
            elif path[0] in ("terminated", "truncated"):
                step[path] = ends[int(path[0] == "truncated")]
            else:
                step[path] = self._numbers((len(at), *field.shape), field.dtype)
        ended = ends.any(0)
        if self._next_step:
            self._resetting[at] = ended
        else:
            self.restart(at[ended].tolist())
        return step

    def _moved(self, leaf: int, at: torch.Tensor, resets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the observations of a step and its next observations."""
        field, obs = self._schema.fields[leaf], self._obs[leaf][at]
        if isinstance(field, rl.Stacked):
            following = torch.cat([obs[:, 1:], self._numbers((len(at), 1, *field.shape), field.dtype)], 1)
        else:
            following = self._numbers((len(at), *field.shape), field.dtype)
        following = torch.where(resets.view(-1, *(1,) * (obs.ndim - 1)), self._first(leaf)[at], following)
        self._obs[leaf][at] = following
        if isinstance(field, rl.Stacked):
            return obs.movedim(1, 1 + field.axis), following.movedim(1, 1 + field.axis)
        return obs, following

    def _first(self, leaf: int) -> torch.Tensor:
        """Return a first observation of every environment; stacks are [N, k, …]."""
        field = self._schema.fields[leaf]
        if not isinstance(field, rl.Stacked):
            return self._numbers((self._num_envs, *field.shape), field.dtype)
        frame = self._numbers((self._num_envs, 1, *field.shape), field.dtype)
        padding = frame if field.pad == "repeat" else torch.zeros_like(frame)
        return torch.cat([*[padding] * (field.k - 1), frame], 1)

    def _numbers(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(shape, generator=self._random, dtype=torch.float64).to(dtype)
        return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=self._random).to(dtype)


def nested(leaves: dict[Any, torch.Tensor], lead: int, squeeze: int | None) -> dict[str, Any]:
    """Nest leaves [steps, K, …] for `extend`, or, with `lead` 0, their first step for `add`."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        value = leaf if lead else leaf[0]
        node[path[-1]] = value.squeeze(lead) if squeeze is None else value
    return tree


def play(buffers: list[rl.ReplayBuffer], seed: int, length: int, *, calls: str = "aaaaeeeecx") -> None:
    """Make the same random calls of all buffers: steps (a), blocks of steps (e), cuts (c) and clears (x)."""
    given: Any = None
    recorder, random = Recorder(buffers[0], seed), torch.Generator().manual_seed(seed + 1)
    num_envs = buffers[0].num_envs

    def below(bound: int) -> int:
        return int(torch.randint(bound, (), generator=random))

    for _ in range(length):
        call = calls[below(len(calls))]
        some = torch.randperm(num_envs or 1, generator=random)[: 1 + below(num_envs or 1)]
        envs = None if num_envs is None or torch.rand((), generator=random) < 0.5 else sorted(some.tolist())
        if call in "ae":
            block = recorder.block(1 + below(4) if call == "e" else 1, envs or list(range(num_envs or 1)))
            given = nested(block, int(call == "e"), num_envs)
        for replay in buffers:
            if call == "a":
                replay.add(**given, env_ids=envs)
            elif call == "e":
                replay.extend(given, env_ids=envs)
            elif call == "c":
                replay.cut(envs)
            else:
                replay.clear()
        if call == "c":
            recorder.restart(envs)
        elif call == "x":
            recorder.clear()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    x, y = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(x, y)


def assert_same_batch(a: TensorDictBase, b: TensorDictBase, what: object = "") -> None:
    """Assert that two batches have the same leaves in the same order, bit for bit."""
    first, second = (list(batch.keys(True, True)) for batch in (a, b))
    assert first == second, what
    for path in first:
        assert same_bits(a.get(path), b.get(path)), (what, path, a.get(path), b.get(path))


def assert_same_rows(a: rl.ReplayBuffer, b: rl.ReplayBuffer) -> None:
    """Assert that two buffers have the same ring state and rows with the same bytes."""
    one, other = a.storage.rows, b.storage.rows
    for name, state in one.ring.state.items():
        assert torch.equal(state, other.ring.state[name]), (name, state, other.ring.state[name])
    for x, y in zip((*one.leaves, *one.next_leaves), (*other.leaves, *other.next_leaves), strict=True):
        assert same_bits(x, y)


def assert_same_batches(a: rl.ReplayBuffer, b: rl.ReplayBuffer, views: Any = VIEWS) -> None:
    """Assert that every view reads the same batch of all stored rows from both buffers."""
    ids = a.ids()
    for view in views if len(ids) else ():
        assert_same_batch(a.read(ids, view), b.read(ids, view), view)
