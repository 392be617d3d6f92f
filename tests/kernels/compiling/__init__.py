"""Tests that compile Triton's kernels, in new processes: in the process of the tests Triton may be an interpreter."""
