"""Modules that the fork server imports before it forks the first process."""

from tests.concurrent import test_rate_limit
from tests.faults import crowd, test_i_leaks, test_j_streams
from tests.faults.checkpoint import test_c_files, victim
from tests.faults.disk import writer

__all__ = ["crowd", "test_c_files", "test_i_leaks", "test_j_streams", "test_rate_limit", "victim", "writer"]
