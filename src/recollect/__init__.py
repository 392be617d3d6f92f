"""recollect: the experience memory of reinforcement learning in PyTorch."""

from recollect import kernels
from recollect.checkpoint import load
from recollect.concurrent import RateLimit, connect, prefetch
from recollect.distillation import DistillationBuffer
from recollect.errors import (
    BufferFullError,
    CheckpointError,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    InvariantError,
    NoCheckpoint,
    NotReadyError,
    PriorityError,
    SchemaError,
)
from recollect.estimators import (
    discounted_return,
    explained_variance,
    gae,
    group_advantage,
    lambda_return,
    n_step_return,
    normalize,
    vtrace,
)
from recollect.inspector import inspect
from recollect.memory import Memory
from recollect.mixture import Mixture
from recollect.norm import RunningNorm
from recollect.replay import ReplayBuffer
from recollect.rollout import RolloutBuffer
from recollect.samplers import Counted, Prioritized, Uniform, WithoutReplacement
from recollect.schema import Carry, Field, Stacked
from recollect.stats import EpisodeStats
from recollect.views import Hindsight, NStep, Sequence, Transition

__version__ = "0.1.0"

__all__ = [
    "BufferFullError",
    "Carry",
    "CheckpointError",
    "CorruptCheckpoint",
    "Counted",
    "DistillationBuffer",
    "EpisodeStats",
    "Field",
    "Hindsight",
    "IncompatibleCheckpoint",
    "InvariantError",
    "Memory",
    "Mixture",
    "NStep",
    "NoCheckpoint",
    "NotReadyError",
    "Prioritized",
    "PriorityError",
    "RateLimit",
    "ReplayBuffer",
    "RolloutBuffer",
    "RunningNorm",
    "SchemaError",
    "Sequence",
    "Stacked",
    "Transition",
    "Uniform",
    "WithoutReplacement",
    "connect",
    "discounted_return",
    "explained_variance",
    "gae",
    "group_advantage",
    "inspect",
    "kernels",
    "lambda_return",
    "load",
    "n_step_return",
    "normalize",
    "prefetch",
    "vtrace",
]
