"""One replay memory for many machines: named, sharded buffers in the processes of a Ray cluster."""

try:
    import ray as _ray  # noqa: F401
except ImportError as error:
    raise ImportError("relive.distributed: expected Ray, got none. Install relive[ray].") from error

from relive.distributed.plan import Checkpoint
from relive.distributed.service import ReplayService
from relive.distributed.writer import Writer
from relive.errors import IncompatibleService, ShardUnavailable

__all__ = ["Checkpoint", "IncompatibleService", "ReplayService", "ShardUnavailable", "Writer"]
