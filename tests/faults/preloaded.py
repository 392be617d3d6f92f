"""What the fork server imports before the first process is asked for."""

from tests.faults import test_i_leaks, test_j_streams
from tests.faults.checkpoint import test_c_files, victim

__all__ = ["test_c_files", "test_i_leaks", "test_j_streams", "victim"]
