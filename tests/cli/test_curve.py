"""The picture of the demo."""

import numpy as np

from relive.cli.demo.curve import trailing_mean


def test_trailing_mean_takes_as_many_as_there_are() -> None:
    assert trailing_mean(np.array([1.0, 3.0, 5.0, 7.0]), 2).tolist() == [1, 2, 4, 6]
