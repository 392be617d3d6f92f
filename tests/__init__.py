"""The tests. Everything here, and every process that it starts, runs torch on one thread.

Torch's threads wait for each other after the smallest call: beside other work on the machine, 10 ms instead of 10 µs.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported, so before any other import
