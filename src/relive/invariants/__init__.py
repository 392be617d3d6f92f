"""What is true of a buffer between any two calls, for `check()` to verify: one file for each kind of memory.

Parts that a buffer is made of (samplers, statistics, generators, …) verify themselves. Nothing here changes anything.
"""
