"""Checks of arguments: the values that they accept, and the full message for every refusal."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from relive.errors import NotReadyError, SchemaError
from relive.schema import checks

LONG = 1 << 200


@pytest.mark.parametrize(
    ("check", "value", "known"),
    [
        (checks.check_positive_int, np.uint8(3), 3),
        (checks.check_fraction, np.float32(0.5), 0.5),
        (checks.check_fraction, 1, 1.0),
        (checks.check_above_zero, math.inf, math.inf),
        (checks.check_finite, 0, 0.0),
        (checks.check_number, -2, -2.0),
    ],
)
def test_numbers_become_python_numbers(check: Callable[..., Any], value: Any, known: float) -> None:
    assert check("x", value) == known
    assert type(check("x", value)) is type(known)


@pytest.mark.parametrize(
    ("check", "arguments", "message"),
    [
        (checks.check_positive_int, (0,), "x: expected a positive int, got 0. Pass an int of at least 1."),
        (checks.check_positive_int, (True,), "x: expected a positive int, got True. Pass an int of at least 1."),
        (checks.check_positive_int, (9, 8), "x: expected at most 8, got 9. Pass a smaller int."),
        (
            checks.check_positive_int,
            (np.uint64(1 << 63),),
            f"x: expected a positive int below 2^63, got {1 << 63}. Pass a smaller int.",
        ),
        (
            checks.check_positive_int,
            (LONG,),
            "x: expected a positive int below 2^63, got an int of 201 bits. Pass a smaller int.",
        ),
        (checks.check_fraction, (1.5,), "x: expected a number from 0 to 1, got 1.5. Pass such a number."),
        (checks.check_fraction, (math.nan,), "x: expected a number from 0 to 1, got nan. Pass such a number."),
        (checks.check_fraction, (False,), "x: expected a number, got bool. Pass a Python float."),
        (checks.check_above_zero, (0,), "x: expected a number above 0, got 0. Pass math.inf for no bound."),
        (
            checks.check_finite,
            (math.inf,),
            "x: expected a finite number of at least 0, got inf. Pass a finite number of at least 0.",
        ),
        (checks.check_choice, ("c", ("a", "b", None)), 'x: expected "a", "b" or None, got \'c\'. Pass one of them.'),
        (checks.check_choice, (None, ("a", "b")), 'x: expected "a" or "b", got None. Pass one of them.'),
        (checks.check_choice, ([], {"a": 1, "b": 2}), 'x: expected "a" or "b", got []. Pass one of them.'),
        (
            checks.check_none_without_argument,
            (3, "state"),
            "x: expected None without state, got int. Make the buffer with state=.",
        ),
        (
            checks.check_keys,
            ({"a": 1, 2: 3}, ("b", "a")),
            "x: expected the keys ['a', 'b'], got the keys ['2', 'a']. Pass exactly the declared fields.",
        ),
        (checks.check_keys, (None, ("a",)), "x: expected the keys ['a'], got None. Pass exactly the declared fields."),
        (checks.check_shape, (torch.zeros(2), (3,), "Pass three."), "x: expected shape (3,), got (2,). Pass three."),
        (
            checks.check_device,
            (torch.zeros(2), torch.device("meta")),
            "x: expected a tensor on meta, got cpu. Call .to('meta').",
        ),
        (
            checks.check_dense,
            (torch.zeros(2).to_sparse(),),
            "x: expected a dense tensor, got torch.sparse_coo. Call .to_dense().",
        ),
    ],
)
def test_the_sentence_says_where_what_was_expected_what_was_got_and_what_to_do(
    check: Callable[..., Any], arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(SchemaError) as refused:
        check("x", *arguments)
    assert str(refused.value) == message


def test_nothing_stored_is_not_ready() -> None:
    assert checks.check_nonempty("x", 3) == 3
    with pytest.raises(NotReadyError, match=r"^x: expected at least 1 stored row, got 0\. Add rows first\.$"):
        checks.check_nonempty("x", 0, "row", "Add rows first.")
