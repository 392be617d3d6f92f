"""Measure the cost of `import relive` beside `import torch`: CPU time and resident memory of fresh interpreters.

Run it as `python -m benchmarks.imports [--rounds 15]`; exits with 1 above the limits that the docs state.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from statistics import median

MAX_TIMES, MAX_MEGABYTES = 1.25, 20
LINES = ("import torch", "import relive", "import torch, tensordict")
USAGE = "; from resource import *; r = getrusage(RUSAGE_SELF); print(r.ru_utime + r.ru_stime, r.ru_maxrss / 1024)"


def measure_cost(line: str) -> tuple[float, float]:
    """Return the CPU seconds and megabytes of an interpreter that runs one line."""
    # Bytecode is cached, as in an installation.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", line + USAGE]
    answer = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    seconds, megabytes = map(float, answer.split())
    return seconds, megabytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds: int = parser.parse_args().rounds
    for line in LINES:
        # The first import reads files from the disk, so it is not counted.
        measure_cost(line)
    costs: dict[str, list[tuple[float, float]]] = {line: [] for line in LINES}
    # Interleaved, so that other load on the machine affects every line.
    for _ in range(rounds):
        for line in LINES:
            costs[line].append(measure_cost(line))
    medians = {line: tuple(map(median, zip(*pairs, strict=True))) for line, pairs in costs.items()}
    seconds, megabytes = medians["import torch"]
    for line, (own_seconds, own_megabytes) in medians.items():
        times, more = own_seconds / seconds, own_megabytes - megabytes
        print(f"{line:26} {own_seconds:5.2f} s  {times:4.2f} times  {own_megabytes:4.0f} MB  {more:+4.0f} MB")
    times, more = medians["import relive"][0] / seconds, medians["import relive"][1] - megabytes
    return int(times > MAX_TIMES or more > MAX_MEGABYTES)


if __name__ == "__main__":
    sys.exit(main())
