"""Train with an original's trainers on its buffers and on ours, and save the scores for the tables of docs/migrating.

Run it as `python -m tools.original_trainers [NAMES] [--only DQN,TD3] [--seeds 3]`, and with `--checkouts`,
`--python` and `--path` as `tools.original_tests`. Without names it trains with every original. Both sides get the same
seeds; each training runs in a new process.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import numpy as np
import torch

from benchmarks.interpreters import make_environment
from relive.compat import patch

from .original_tests import copy_sources, edit_results, find_package, make_parser, parse
from .trainer_cases import Trainer

SIDES = ("original", "relive")
WITH_TRAINERS = ("agilerl", "apexrl", "embodichain", "rsl_rl", "stable_baselines3")


def load_trainers(original: str) -> dict[str, Trainer]:
    """Return the trainers of an original by name."""
    return {trainer.name: trainer for trainer in import_module(f"{__package__}.trainer_cases.{original}").trainers()}


def train(original: str, name: str, side: str, seed: int) -> float:
    """Train once in this process and return the score."""
    # The originals raise many warnings.
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 the originals draw from this generator
    torch.manual_seed(seed)
    trainer = load_trainers(original)[name]
    with patch(original) if side == "relive" else nullcontext():
        return trainer.train(seed)


class Runner:
    """Runner of this module in new processes, with copies of relive and of these tools on the path."""

    def __init__(self, folder: Path, python: str, paths: Sequence[Path]) -> None:
        copy_sources(folder)
        self._folder, self._python = folder, python
        self._environment = make_environment(folder, *paths) | {"OMP_NUM_THREADS": "1"}

    def run(self, *arguments: str) -> str:
        """Run this module in a new process and return the last line that it prints."""
        command = [self._python, "-m", f"{__package__}.original_trainers", *arguments]
        completed = subprocess.run(
            command, cwd=self._folder, env=self._environment, check=False, stdout=subprocess.PIPE
        )
        if completed.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {completed.returncode}.")
        return completed.stdout.decode().splitlines()[-1]


def save_scores(original: str, name: str, scores: dict[str, list[float]], task: str) -> None:
    """Write the scores of a trainer into the results file."""
    with edit_results(original) as entry:
        entry.setdefault("trainings", {})[name] = {"task": task, **scores}


def compare(original: str, only: str | None, seeds: int, python: str, paths: Sequence[Path]) -> None:
    """Train with the original's buffers and with ours, alternately, and save the scores."""
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(Path(folder), python, paths)
        tasks: dict[str, str] = json.loads(runner.run(original, "--list"))
        for name in only.split(",") if only else tasks:
            scores: dict[str, list[float]] = {side: [] for side in SIDES}
            for seed in range(seeds):
                for side in SIDES:
                    score = json.loads(runner.run(original, "--one", name, side, str(seed)))
                    scores[side].append(score)
                    print(f"{original}, {name}, seed {seed}, {side}: {score:.4g}", flush=True)
            save_scores(original, name, scores, tasks[name])


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser("original_trainers", __doc__ or "")
    parser.add_argument("--only", metavar="NAMES", help="some of the trainers of one original, separated by commas")
    parser.add_argument("--seeds", type=int, default=3, help="how many trainings on each side (3)")
    parser.add_argument("--list", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--one", nargs=3, metavar=("NAME", "SIDE", "SEED"), help=argparse.SUPPRESS)
    return parse(parser, arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and save the scores; hidden options list the trainers or train once."""
    options = parse_options(arguments)
    if options.one:
        name, side, seed = options.one
        print(f"\n{json.dumps(train(options.names[0], name, side, int(seed)))}")
    elif options.list:
        print(json.dumps({name: trainer.task for name, trainer in load_trainers(options.names[0]).items()}))
    else:
        for name in options.names or WITH_TRAINERS:
            paths = find_package(name, options.checkouts, options.path)
            compare(name, options.only, options.seeds, options.python.get(name, sys.executable), paths)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
