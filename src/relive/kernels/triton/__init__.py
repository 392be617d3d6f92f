"""Triton kernels for CUDA and ROCm: one launch instead of many torch ops, without synchronisation.

Importing this package does not import Triton; its modules do.

The tests run every kernel under Triton's interpreter, against the native core, torch ops and a slow reference, and run
its programs in several orders. `benchmarks/compile_kernels.py` compiles them ahead of time for sm_80, sm_90 and
gfx942. Nothing has run on a GPU: the order of memory accesses between warps and all times are unproven.
"""
