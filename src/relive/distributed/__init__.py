"""A replay buffer for several machines, sharded over the processes of a Ray cluster."""

from relive.errors import IncompatibleService, ShardUnavailable, explain

try:
    import ray as _ray  # noqa: F401
except ImportError as error:
    remedy = 'Run pip install ".[ray]" in a clone of relive.'
    raise ImportError(explain("relive.distributed", "Ray to be installed", error, remedy)) from error

from relive.distributed.protocol import Checkpoint
from relive.distributed.service import ReplayService, Writer

__all__ = ["Checkpoint", "IncompatibleService", "ReplayService", "ShardUnavailable", "Writer"]
