"""Triton's kernels compiled, in processes of their own: in the process of the tests Triton may be an interpreter."""
