"""ApexRL's helpers for observations that are tensors or dicts of tensors, under its module path."""

from relive.compat.apexrl.utils.observation import *  # noqa: F403
