"""Advantages and returns: one launch that goes backwards through time, a lane for each column (environment, agent).

The order of operations is that of the native core without fused multiply-add, step after step, so the results are the
same bit for bit. A parallel scan over time would round differently. Inputs may have any strides and dtypes.
"""

# What is jitted is Triton's language, which pyright takes for Python.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from relive.kernels.triton.launching import launch
from relive.kernels.triton.variants import Variant

BLOCK = 64
OPTIONS = {"num_warps": 2, "enable_fp_fusion": False}


@triton.jit
def _at(base, strides, t, n, a):
    """The addresses of row t."""
    return base + t * strides[0] + n * strides[1] + a * strides[2]


@triton.jit
def reverse_scan_kernel(
    first, second, reward, value, next_value, ratio, terminated, truncated, mask,
    reward_strides, value_strides, next_strides, ratio_strides, terminated_strides, truncated_strides, mask_strides,
    steps, envs, agents,
    gamma: tl.float64, lam: tl.float64, rho_bar: tl.float64, c_bar: tl.float64,
    RULE: tl.constexpr, MASKED: tl.constexpr, KEEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`first` and `second` [steps, envs · agents]: the results of one estimator, in the order that it returns them."""
    number: tl.constexpr = first.dtype.element_ty
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.full((), envs, tl.int64) * agents
    inside = column < columns
    n, a = column // agents, column % agents
    gamma_ = tl.full((), gamma, tl.float64).to(number)
    lam_ = tl.full((), lam, tl.float64).to(number)
    decay = gamma_ * lam_
    carry = tl.zeros((BLOCK,), number)
    follows = tl.zeros((BLOCK,), tl.int1)  # a row comes after this one, and is a transition
    for i in range(steps):
        t = tl.full((), steps - 1, tl.int64) - i
        is_end = tl.load(_at(terminated, terminated_strides, t, n, a), inside, other=0) != 0
        is_cut = tl.load(_at(truncated, truncated_strides, t, n, a), inside, other=0) != 0
        valid = inside
        if MASKED:
            valid = tl.load(_at(mask, mask_strides, t, n, a), inside, other=0) != 0
        goes_on = follows & ~(is_end | is_cut)
        reward_ = tl.load(_at(reward, reward_strides, t, n, a), inside, other=0).to(number)
        next_ = tl.load(_at(next_value, next_strides, t, n, a), inside, other=0).to(number)
        zero = tl.zeros((BLOCK,), number)
        bootstrap = tl.where(is_end, zero, next_)
        later = decay * tl.where(goes_on, carry, zero)
        place = t * columns + column
        if RULE == "lambda_return":
            # With λ = 1 the next value of a step that goes on has no weight, even if it is NaN.
            held = zero
            if KEEPS:
                held = (1 - lam_) * bootstrap
            carry = reward_ + gamma_ * tl.where(goes_on, held, bootstrap) + later
            tl.store(first + place, tl.where(valid, carry, zero), inside)
        else:
            value_ = tl.load(_at(value, value_strides, t, n, a), inside, other=0).to(number)
            delta = reward_ - value_ + gamma_ * bootstrap
            if RULE == "gae":
                carry = delta + later
                tl.store(first + place, tl.where(valid, carry, zero), inside)
            else:
                ratio_ = tl.load(_at(ratio, ratio_strides, t, n, a), inside, other=0).to(number)
                most_rho = tl.full((), rho_bar, tl.float64).to(number)
                most_c = tl.full((), c_bar, tl.float64).to(number)
                rho = tl.where(ratio_ > most_rho, most_rho, ratio_)
                c = tl.where(ratio_ > most_c, most_c, ratio_)
                carry = rho * delta + c * later
                tl.store(first + place, tl.where(valid, rho * (delta + later), zero), inside)
            tl.store(second + place, tl.where(valid, carry + value_, zero), inside)
        follows = valid


def scan(
    rule: str, dtype: torch.dtype, tensors: Sequence[torch.Tensor | None], settings: Sequence[float]
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The estimator `rule` of tensors [T, …] in the order of its arguments, in this dtype."""
    given = iter(tensors)
    ratio = next(given) if rule == "vtrace" else None
    reward = next(given)
    value = None if rule == "lambda_return" else next(given)
    next_value, terminated, truncated, mask = given
    assert reward is not None
    first, second = (torch.empty(reward.shape, dtype=dtype, device=reward.device) for _ in range(2))
    if reward.numel():
        order = (reward, value, next_value, ratio, terminated, truncated, mask)
        # What an estimator does not have is not read.
        read = [_three_axes(reward if tensor is None else tensor) for tensor in order]
        steps, envs, agents = read[0].shape
        gamma, lam, rho_bar, c_bar = (*settings, 0.0, 0.0)[:4]
        launch(reverse_scan_kernel, first, triton.cdiv(envs * agents, BLOCK))(
            first, second, *read, *(tensor.stride() for tensor in read), steps, envs, agents,
            gamma, lam, rho_bar, c_bar,
            RULE=rule, MASKED=mask is not None, KEEPS=lam != 1, BLOCK=BLOCK, **OPTIONS,
        )  # fmt: skip
    return first if rule == "lambda_return" else (first, second)


def _three_axes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as [T, N, A], in the same memory if its axes allow."""
    if tensor.ndim < 3:
        return tensor.reshape(*tensor.shape, *(1,) * (3 - tensor.ndim))
    return tensor.flatten(2)


def _strides(*types: str) -> dict[str, tuple[str, ...]]:
    names = ("reward", "value", "next", "ratio", "terminated", "truncated", "mask")
    return {f"{name}_strides": types for name in names}


def _variant(name: str, rule: str, masked: bool, number: str, given: str, stride: str = "i32") -> Variant:
    tensors = {"first": f"*{number}", "second": f"*{number}"}
    tensors |= dict.fromkeys(("reward", "value", "next_value", "ratio"), f"*{given}")
    tensors |= dict.fromkeys(("terminated", "truncated", "mask"), "*i1")
    sizes = {"steps": "i32", "envs": "i32", "agents": "i32"}
    rates = dict.fromkeys(("gamma", "lam", "rho_bar", "c_bar"), "fp64")
    constants = {"RULE": rule, "MASKED": masked, "KEEPS": True, "BLOCK": BLOCK}
    types = tensors | _strides(stride, stride, stride) | sizes | rates
    return Variant(reverse_scan_kernel, name, types, constants, OPTIONS, tuple(tensors))


VARIANTS = (
    _variant("GAE float32", "gae", False, "fp32", "fp32"),
    _variant("GAE float32, masked, int64 strides", "gae", True, "fp32", "fp32", "i64"),
    _variant("GAE float64, masked", "gae", True, "fp64", "fp64"),
    _variant("GAE of bfloat16", "gae", False, "fp32", "bf16"),
    _variant("λ-return float32, masked", "lambda_return", True, "fp32", "fp32"),
    _variant("V-trace float32, masked", "vtrace", True, "fp32", "fp32"),
)
