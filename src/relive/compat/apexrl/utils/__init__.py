"""ApexRL's functions for observations under ApexRL's module path."""

from relive.compat.apexrl.utils.observation import *  # noqa: F403
