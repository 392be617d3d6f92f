"""One replay memory for many machines: named, sharded buffers in the processes of a Ray cluster."""

try:
    import ray as _ray  # noqa: F401
except ImportError as error:
    raise ImportError("recollect.distributed: expected Ray, got none. Install recollect[ray].") from error

from recollect.distributed.plan import Checkpoint
from recollect.distributed.service import ReplayService
from recollect.distributed.writer import Writer
from recollect.errors import IncompatibleService, ShardUnavailable

__all__ = ["Checkpoint", "IncompatibleService", "ReplayService", "ShardUnavailable", "Writer"]
