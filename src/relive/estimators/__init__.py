"""Pure functions from rewards to learning targets. No gradient flows, and inputs are not changed."""

from relive.estimators.advantage import gae, vtrace
from relive.estimators.group import group_advantage
from relive.estimators.returns import discounted_return, lambda_return, n_step_return
from relive.estimators.scale import explained_variance, normalize

__all__ = [
    "discounted_return",
    "explained_variance",
    "gae",
    "group_advantage",
    "lambda_return",
    "n_step_return",
    "normalize",
    "vtrace",
]
