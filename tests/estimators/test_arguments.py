"""Arguments that the estimators accept, and messages for arguments that they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from relive import estimators as rl
from relive.errors import SchemaError
from tests.estimators.calls import ARGUMENTS, SETTINGS, assert_equal, call, every_estimator, sample

ONE_EACH = "Nothing is broadcast: pass the expected shape."
COMPARE = "Compare it, as in flag != 0."
CONVERT = "Convert it with torch.as_tensor."
GROUP = "Pass how many neighbouring environments form a group."

pytestmark = pytest.mark.usefixtures("backend")


def refusal(function: Callable[..., Any], *arguments: Any, **settings: Any) -> str:
    with pytest.raises(SchemaError) as caught:
        function(*arguments, **settings)
    return str(caught.value)


def gae(**changed: Any) -> Any:
    """Call rl.gae on [5, 8] tensors, with some arguments changed."""
    arguments = {**sample(5, 8), "gamma": 0.9, "lam": 0.8, **changed}
    arguments.pop("log_ratio")
    return rl.gae(**arguments)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"value": torch.zeros(5, 8, 1)},
            "value: expected shape (5, 8) to match reward, got (5, 8, 1). Squeeze the last axis.",
        ),
        (
            {"next_value": torch.zeros(8, 5)},
            "next_value: expected shape (5, 8) to match reward, got (8, 5). Transpose it: time comes first.",
        ),
        ({"value": torch.zeros(8)}, f"value: expected shape (5, 8) to match reward, got (8,). {ONE_EACH}"),
        ({"value": torch.zeros(())}, f"value: expected shape (5, 8) to match reward, got (). {ONE_EACH}"),
        (
            {"next_value": torch.zeros(5, 1)},
            f"next_value: expected shape (5, 8) to match reward, got (5, 1). {ONE_EACH}",
        ),
        (
            {"terminated": torch.zeros(5, dtype=torch.bool)},
            f"terminated: expected shape (5, 8) to match reward, got (5,). {ONE_EACH}",
        ),
        ({"truncated": torch.zeros(5, 8)}, f"truncated: expected dtype torch.bool, got torch.float32. {COMPARE}"),
        (
            {"terminated": torch.zeros(5, 8, dtype=torch.uint8)},
            f"terminated: expected dtype torch.bool, got torch.uint8. {COMPARE}",
        ),
        ({"mask": torch.ones(5, 8)}, f"mask: expected dtype torch.bool, got torch.float32. {COMPARE}"),
        (
            {"mask": torch.ones(5, 8, 1).bool()},
            "mask: expected shape (5, 8) to match reward, got (5, 8, 1). Squeeze the last axis.",
        ),
        ({"reward": np.zeros((5, 8), np.float32)}, f"reward: expected a torch.Tensor, got numpy.ndarray. {CONVERT}"),
        ({"value": [1.0, 2.0]}, f"value: expected a torch.Tensor, got list. {CONVERT}"),
        ({"terminated": None}, f"terminated: expected a torch.Tensor, got None. {CONVERT}"),
        ({"truncated": np.zeros((5, 8), bool)}, f"truncated: expected a torch.Tensor, got numpy.ndarray. {CONVERT}"),
        (
            {"reward": torch.tensor(1.0)},
            "reward: expected shape [T], [T, N] or [T, N, …], got (). Add the time axis in front.",
        ),
        (
            {"value": torch.zeros(5, 8, dtype=torch.complex64)},
            "value: expected real numbers, got torch.complex64. Pass its real part.",
        ),
        (
            {"value": torch.zeros(5, 8).to(torch.float8_e4m3fn)},
            "value: expected numbers or bools, got torch.float8_e4m3fn. Convert it with .float().",
        ),
        (
            {"value": torch.zeros(5, 8).to_sparse()},
            "value: expected a dense tensor, got torch.sparse_coo. Call .to_dense().",
        ),
        (
            {"value": torch.zeros(5, 8, device="meta")},
            "value: expected a tensor on cpu to match reward, got meta. Call .to('cpu').",
        ),
        (
            {"mask": torch.ones(5, 8, device="meta").bool()},
            "mask: expected a tensor on cpu to match reward, got meta. Call .to('cpu').",
        ),
        ({"gamma": 1.5}, "gamma: expected a number from 0 to 1, got 1.5. Pass such a number."),
        ({"lam": -0.1}, "lam: expected a number from 0 to 1, got -0.1. Pass such a number."),
        ({"gamma": float("nan")}, "gamma: expected a number from 0 to 1, got nan. Pass such a number."),
        ({"gamma": "0.9"}, "gamma: expected a number, got str. Pass a Python float."),
        ({"lam": True}, "lam: expected a number, got bool. Pass a Python float."),
        ({"gamma": None}, "gamma: expected a number, got None. Pass a Python float."),
        ({"gamma": torch.tensor(0.9)}, "gamma: expected a number, got torch.Tensor. Pass a Python float."),
        ({"gamma": 10**400}, "gamma: expected a number, got an int too large for a float. Pass a smaller number."),
    ],
)
def test_a_wrong_argument_is_refused_by_name(changed: dict[str, Any], message: str) -> None:
    assert refusal(gae, **changed) == message


@every_estimator
def test_every_tensor_argument_is_checked(name: str) -> None:
    tensors = sample(5, 8)
    for argument in (*ARGUMENTS[name], "mask"):
        for wrong in (torch.zeros(5, 8, 1), torch.zeros(5), np.zeros((5, 8))):
            # The first value sets the shape, so the error for a wrong reward names the next argument.
            told = refusal(call, name, {**tensors, argument: wrong}, **SETTINGS[name])
            assert told.startswith(f"{argument}:") or argument == "reward"


@every_estimator
def test_every_number_is_checked(name: str) -> None:
    for setting in SETTINGS[name]:
        for wrong in (-1, float("nan"), "1", False):
            told = refusal(call, name, sample(5, 8), **{**SETTINGS[name], setting: wrong})
            assert told.startswith(f"{setting}: expected ")


@pytest.mark.parametrize("n", [0, -3, 1.0, True, "3", None])
def test_n_is_a_positive_int(n: Any) -> None:
    told = refusal(call, "n_step_return", sample(5, 8), gamma=0.9, n=n)
    assert told.startswith("n: expected an int of at least 1, got ")
    assert told.endswith(". Pass the number of steps to sum.")


def test_last_value_is_one_row_of_the_reward() -> None:
    reward, none = torch.ones(5, 8), torch.zeros(5, 8, dtype=torch.bool)
    for wrong in (torch.zeros(8, 1), torch.zeros(1, 8), torch.zeros(())):
        told = refusal(rl.discounted_return, reward, none, none, gamma=0.9, last_value=wrong)
        got = tuple(wrong.shape)
        assert told.startswith(f"last_value: expected shape (8,) to match one row of reward, got {got}.")
    told = refusal(rl.discounted_return, reward, none, none, gamma=0.9, last_value=0.0)
    assert told == "last_value: expected a tensor of shape (8,), got float. Pass one value per environment."
    told = refusal(rl.discounted_return, reward, none, none, gamma=0.9, last_value=torch.zeros(8, device="meta"))
    assert told == "last_value: expected a tensor on cpu, got meta. Call .to('cpu')."


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"group_size": 1}, f"group_size: expected an int of at least 2, got 1. {GROUP}"),
        (
            {"group_size": 3},
            "group_size: expected a divisor of 8 environments, got 3. Choose a group_size that divides them.",
        ),
        ({"group_size": 2.0}, f"group_size: expected an int of at least 2, got float. {GROUP}"),
        (
            {"reward": torch.zeros(5), "done": torch.zeros(5).bool()},
            "reward: expected shape [T, N] or [T, N, …], got (5,). Pass one reward per environment.",
        ),
        ({"done": torch.zeros(5, 8)}, f"done: expected dtype torch.bool, got torch.float32. {COMPARE}"),
        ({"done": None}, f"done: expected a torch.Tensor, got None. {CONVERT}"),
        ({"mask": torch.zeros(5, 8)}, f"mask: expected dtype torch.bool, got torch.float32. {COMPARE}"),
        ({"eps": "x"}, "eps: expected a number, got str. Pass a Python float."),
    ],
)
def test_group_advantage_refuses_by_name(changed: dict[str, Any], message: str) -> None:
    arguments = {"reward": torch.zeros(5, 8), "done": torch.zeros(5, 8).bool(), "group_size": 2, **changed}
    assert refusal(rl.group_advantage, **arguments) == message


def test_statistics_refuse_what_would_be_broadcast() -> None:
    assert refusal(rl.explained_variance, torch.zeros(8), torch.zeros(8, 1)).startswith("return_: expected shape (8,)")
    assert refusal(rl.normalize, torch.zeros(8), torch.ones(8, 1).bool()).startswith("mask: expected shape (8,)")
    assert refusal(rl.normalize, torch.zeros(8), torch.ones(8)).startswith("mask: expected dtype torch.bool")


@every_estimator
def test_mixed_numbers_are_promoted_and_integers_become_floats(name: str) -> None:
    tensors = sample(5, 8)
    whole = (tensors["reward"] * 4).long()  # pyright: ignore[reportOptionalOperand]
    for reward, other, dtype in (
        (whole, torch.float32, torch.float32),
        (whole, torch.float64, torch.float64),
        (whole > 0, torch.float32, torch.float32),
        (whole.float(), torch.float64, torch.float64),
        (whole.double(), torch.float32, torch.float64),
        (whole.bfloat16(), torch.bfloat16, torch.float32),
    ):
        mixed: dict[str, Tensor | None] = {
            k: x.to(other) if x is not None and x.is_floating_point() else x for k, x in tensors.items()
        }
        exact = {k: x.double() if x is not None and x.is_floating_point() else x for k, x in mixed.items()}
        got = call(name, {**mixed, "reward": reward}, **SETTINGS[name])
        for mine, want in zip(got, call(name, {**exact, "reward": reward.double()}, **SETTINGS[name]), strict=True):
            assert mine.dtype == dtype
            assert_equal(mine, want)


@every_estimator
def test_a_flag_per_environment_counts_for_all_its_agents(name: str) -> None:
    tensors = sample(5, 4, 3)
    flags = {k: torch.rand(5, 4) < 0.3 for k in ("terminated", "truncated")} | {"mask": torch.rand(5, 4) < 0.7}
    wide = {k: x[..., None].expand(5, 4, 3) for k, x in flags.items()}
    got, want = call(name, {**tensors, **flags}, **SETTINGS[name]), call(name, {**tensors, **wide}, **SETTINGS[name])
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)
    for wrong in (torch.zeros(5).bool(), torch.zeros(4, 3).bool(), torch.zeros(5, 4, 1).bool()):
        told = refusal(call, name, {**tensors, "terminated": wrong}, **SETTINGS[name])
        assert told.startswith("terminated: expected ")


def test_numbers_may_be_ints_and_numpy_numbers() -> None:
    want = gae(gamma=1.0, lam=0.5)
    for gamma, lam in ((1, 0.5), (np.float64(1), np.float32(0.5)), (np.int64(1), np.float16(0.5))):
        assert torch.equal(gae(gamma=gamma, lam=lam)[0], want[0])
    tensors = sample(5, 8)
    want = call("n_step_return", tensors, gamma=1.0, n=3)
    assert torch.equal(call("n_step_return", tensors, gamma=1, n=np.int64(3))[0], want[0])
