"""Experience buffers for reinforcement learning in PyTorch."""

from relive import kernels
from relive.checkpoint.loading import load
from relive.concurrent import RateLimit, connect, prefetch
from relive.distillation import DistillationBuffer
from relive.errors import (
    BufferFullError,
    CheckpointError,
    ClosedError,
    CorruptCheckpoint,
    DataWarning,
    IncompatibleCheckpoint,
    InvariantError,
    NoCheckpoint,
    NotReadyError,
    PriorityError,
    SchemaError,
)
from relive.estimators import (
    discounted_return,
    explained_variance,
    gae,
    group_advantage,
    lambda_return,
    n_step_return,
    normalize,
    vtrace,
)
from relive.inspector import inspect
from relive.replay.buffer import ReplayBuffer
from relive.replay.mixture import Mixture
from relive.replay.samplers import (
    Counted,
    Linear,
    NewFirst,
    Prioritized,
    Recent,
    Sampler,
    Uniform,
    WithoutReplacement,
    sequence_priority,
)
from relive.replay.views import Hindsight, NStep, Sequence, Transition, View, Window
from relive.rollout.buffer import RolloutBuffer
from relive.schema.fields import Carry, Field, Mutable, Stacked
from relive.statistics.episodes import EpisodeStats
from relive.statistics.norm import RunningNorm
from relive.storage import Memory

__version__ = "0.1.0"

__all__ = [
    "BufferFullError",
    "Carry",
    "CheckpointError",
    "ClosedError",
    "CorruptCheckpoint",
    "Counted",
    "DataWarning",
    "DistillationBuffer",
    "EpisodeStats",
    "Field",
    "Hindsight",
    "IncompatibleCheckpoint",
    "InvariantError",
    "Linear",
    "Memory",
    "Mixture",
    "Mutable",
    "NStep",
    "NewFirst",
    "NoCheckpoint",
    "NotReadyError",
    "Prioritized",
    "PriorityError",
    "RateLimit",
    "Recent",
    "ReplayBuffer",
    "RolloutBuffer",
    "RunningNorm",
    "Sampler",
    "SchemaError",
    "Sequence",
    "Stacked",
    "Transition",
    "Uniform",
    "View",
    "Window",
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
    "sequence_priority",
    "vtrace",
]
