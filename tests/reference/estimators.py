"""The estimators written out: slow loops in float64 straight from the formulas, one column at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Column = dict[str, list[float]]


def gae(column: Column, *, gamma: float, lam: float) -> list[list[float]]:
    r, v, nv, steps = column["reward"], column["value"], column["next_value"], len(column["reward"])
    advantage, return_ = [0.0] * steps, [0.0] * steps
    for t in reversed(range(steps)):
        if not column["mask"][t]:
            continue
        bootstrap = 0.0 if column["terminated"][t] else nv[t]
        delta = r[t] + gamma * bootstrap - v[t]
        advantage[t] = delta + (gamma * lam * advantage[t + 1] if goes_on(column, t) else 0.0)
        return_[t] = advantage[t] + v[t]
    return [advantage, return_]


def lambda_return(column: Column, *, gamma: float, lam: float) -> list[list[float]]:
    r, nv, steps = column["reward"], column["next_value"], len(column["reward"])
    return_ = [0.0] * steps
    for t in reversed(range(steps)):
        if not column["mask"][t]:
            continue
        if column["terminated"][t]:
            return_[t] = r[t]
        elif not goes_on(column, t):
            return_[t] = r[t] + gamma * nv[t]
        elif lam == 1:
            return_[t] = r[t] + gamma * return_[t + 1]
        else:
            return_[t] = r[t] + gamma * ((1 - lam) * nv[t] + lam * return_[t + 1])
    return [return_]


def n_step_return(column: Column, *, gamma: float, n: int) -> list[list[float]]:
    r, nv, steps = column["reward"], column["next_value"], len(column["reward"])
    return_ = [0.0] * steps
    for t in range(steps):
        if not column["mask"][t]:
            continue
        k = 1
        while k < n and goes_on(column, t + k - 1):
            k += 1
        last = t + k - 1
        return_[t] = sum(gamma**i * r[t + i] for i in range(k))
        return_[t] += 0.0 if column["terminated"][last] else gamma**k * nv[last]
    return [return_]


def vtrace(column: Column, *, gamma: float, lam: float, rho_bar: float, c_bar: float) -> list[list[float]]:
    r, v, nv, steps = column["reward"], column["value"], column["next_value"], len(column["reward"])
    advantage, return_, excess = [0.0] * steps, [0.0] * steps, 0.0
    for t in reversed(range(steps)):
        if not column["mask"][t]:
            continue
        ratio = math.exp(column["log_ratio"][t])
        rho, c = min(ratio, rho_bar), min(ratio, c_bar)
        bootstrap = 0.0 if column["terminated"][t] else nv[t]
        delta = r[t] + gamma * bootstrap - v[t]
        behind = excess if goes_on(column, t) else 0.0
        advantage[t] = rho * (delta + gamma * lam * behind)
        excess = rho * delta + gamma * lam * c * behind
        return_[t] = v[t] + excess
    return [advantage, return_]


def group_advantage(
    reward: Tensor, done: Tensor, *, group_size: int, gamma: float, first_episode_only: bool, eps: float, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    steps, envs = reward.shape
    returns, advantage = torch.zeros(steps, envs).double(), torch.zeros(steps, envs).double()
    kept = mask.clone()
    for env in range(envs):
        behind = 0.0
        for t in reversed(range(steps)):
            if not mask[t, env]:
                behind = 0.0
                continue
            behind = float(reward[t, env]) + (0.0 if done[t, env] else gamma * behind)
            returns[t, env] = behind
            ended = any(bool(done[i, env]) and bool(mask[i, env]) for i in range(t))
            kept[t, env] = not (first_episode_only and ended)
    for t in range(steps):
        for start in range(0, envs, group_size):
            group = [env for env in range(start, start + group_size) if kept[t, env]]
            mean = sum(float(returns[t, env]) for env in group) / max(len(group), 1)
            variance = sum((float(returns[t, env]) - mean) ** 2 for env in group) / max(len(group), 1)
            for env in group:
                advantage[t, env] = (returns[t, env] - mean) / (math.sqrt(variance) + eps)
    return returns, kept, advantage


def goes_on(column: Column, t: int) -> bool:
    """Whether row t + 1 is stored and belongs to the episode of row t."""
    ended = column["terminated"][t] or column["truncated"][t]
    return not ended and t + 1 < len(column["mask"]) and bool(column["mask"][t + 1])


def by_column(
    estimator: Callable[..., list[list[float]]], tensors: dict[str, Tensor | None], **settings: float
) -> list[Tensor]:
    """Apply the estimator to every column of [T, …] tensors; flags may lack the reward's last axes."""
    shape = tensors["reward"].shape  # pyright: ignore[reportOptionalMemberAccess]
    tensors = {name: torch.ones(shape) if tensor is None else tensor for name, tensor in tensors.items()}
    columns = {name: _columns(tensor, shape) for name, tensor in tensors.items() if tensor is not None}
    results = []
    for i in range(columns["reward"].shape[1]):
        results.append(estimator({name: column[:, i].tolist() for name, column in columns.items()}, **settings))
    outputs = len(results[0]) if results else 0
    return [
        torch.tensor([result[k] for result in results], dtype=torch.float64).T.reshape(shape) for k in range(outputs)
    ]


def _columns(tensor: Tensor, shape: torch.Size) -> Tensor:
    tensor = tensor.reshape(*tensor.shape, *(1,) * (len(shape) - tensor.ndim)).expand(shape)
    return tensor.detach().double().reshape(shape[0], -1)
