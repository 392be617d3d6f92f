"""rsl_rl's rollout storage on relive's core, and its algorithms and runners with this storage.

The modules have rsl_rl's paths below this package: `relive.compat.rsl_rl.storage`, `.algorithms`, `.runners`. The
storage works without rsl_rl; algorithms and runners are subclasses of the installed classes.
`relive.compat.patch("rsl_rl")` lets rsl_rl's own algorithms make relive's storage.
"""

from relive.compat.rsl_rl.storage import RolloutStorage

__all__ = ["RolloutStorage"]
