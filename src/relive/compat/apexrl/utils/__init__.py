"""ApexRL's helpers for observations that are tensors or dicts of tensors, under the path that it has them at."""

from relive.compat.apexrl.utils.observation import *  # noqa: F403
