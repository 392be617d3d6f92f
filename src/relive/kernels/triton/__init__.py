"""Triton kernels for CUDA and ROCm: one launch instead of many torch ops, without synchronisation.

Importing this package does not import Triton; its modules do. `VARIANTS` in a module lists the forms in which its
kernels are compiled; the tests compile all of them ahead of time for three GPUs.

Verification: every kernel runs under Triton's interpreter, against the native core, torch ops and a slow
reference, also with its programs in other orders; every variant compiles for sm_80, sm_90 and gfx942 without spilled
registers. Nothing here has run on a GPU: the order of memory accesses between warps and all times are unproven.
"""
