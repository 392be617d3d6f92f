"""Kernels for CUDA and ROCm, in Triton: one launch where torch ops take many, and no wait for the device.

Importing this package imports no Triton; its modules do. Each module with kernels has a list `VARIANTS` of the forms
that they are compiled in, and everything in such a list is compiled ahead of time for three GPUs by the tests.

What is verified, and where: every kernel runs under Triton's interpreter, against the native core, torch ops and a slow
reference, also with its programs in other orders; every variant compiles for sm_80, sm_90 and gfx942 without spilled
registers. Nothing here has run on a GPU: the order of memory accesses between warps and all times are unproven.
"""
