"""Pure functions from rewards to learning targets. No gradient flows, and inputs are not changed."""

from relive.estimators.normalization import explained_variance, group_advantage, normalize
from relive.estimators.returns import discounted_return, gae, lambda_return, n_step_return, vtrace

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
