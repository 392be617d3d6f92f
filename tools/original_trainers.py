"""Train with an original's trainers on its buffers and on ours, and save the scores for the tables of docs/migrating.

Run it as `python -m tools.original_trainers [NAMES] [--only DQN,TD3] [--seeds 3]`, with the options of
`tools.original_tests` about places. Without names it trains with every original. Both sides get the same seeds,
and every training a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
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

from relive.compat import patch

from .kept_originals import KEPT, change
from .original_tests import copy_sources, package_of, parse, parser_of
from .trainer_cases import Trainer

SIDES = ("original", "relive")
WITH_TRAINERS = ("agilerl", "apexrl", "embodichain", "rsl_rl", "stable_baselines3")


def trainers_of(original: str) -> dict[str, Trainer]:
    """The trainers of an original by name."""
    return {trainer.name: trainer for trainer in import_module(f"{__package__}.trainer_cases.{original}").trainers()}


def train(original: str, name: str, side: str, seed: int) -> float:
    """Train once in this process and return the score."""
    warnings.filterwarnings("ignore")  # most are the originals' own
    torch.set_num_threads(1)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 the originals draw from it
    torch.manual_seed(seed)
    trainer = trainers_of(original)[name]
    with patch(original) if side == "relive" else nullcontext():
        return trainer.train(seed)


class Elsewhere:
    """Starts trainings in processes of an interpreter, with copies of relive and of these tools on its path."""

    def __init__(self, folder: Path, python: str, paths: Sequence[Path]) -> None:
        copy_sources(folder)
        self._folder, self._python = folder, python
        path = os.pathsep.join([str(folder), *map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._settings = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def run(self, *arguments: str) -> str:
        """The last line that a process of this module prints."""
        command = [self._python, "-m", f"{__package__}.original_trainers", *arguments]
        done = subprocess.run(command, cwd=self._folder, env=self._settings, check=False, stdout=subprocess.PIPE)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}.")
        return done.stdout.decode().splitlines()[-1]


def keep(original: str, name: str, reached: dict[str, list[float]], task: str, path: Path = KEPT) -> None:
    """Write the scores of a trainer into the results file."""
    with change(original, path) as kept:
        kept.setdefault("trainings", {})[name] = {"task": task, **reached}


def compare(original: str, only: str | None, seeds: int, python: str, paths: Sequence[Path]) -> None:
    """Train on both sides alternately."""
    with tempfile.TemporaryDirectory() as folder:
        elsewhere = Elsewhere(Path(folder), python, paths)
        tasks: dict[str, str] = json.loads(elsewhere.run(original, "--list"))
        for name in only.split(",") if only else tasks:
            reached: dict[str, list[float]] = {side: [] for side in SIDES}
            for seed in range(seeds):
                for side, scores in reached.items():
                    scores.append(json.loads(elsewhere.run(original, "--one", name, side, str(seed))))
                    print(f"{original}, {name}, seed {seed}, {side}: {scores[-1]:.4g}", flush=True)
            keep(original, name, reached, tasks[name])


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of("original_trainers", __doc__ or "")
    parser.add_argument("--only", metavar="NAMES", help="some of the trainers of one original, separated by commas")
    parser.add_argument("--seeds", type=int, default=3, help="how many trainings on each side (3)")
    parser.add_argument("--list", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--one", nargs=3, metavar=("NAME", "SIDE", "SEED"), help=argparse.SUPPRESS)
    return parse(parser, arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, or list the trainers."""
    options = options_of(arguments)
    if options.one:
        name, side, seed = options.one
        print(f"\n{json.dumps(train(options.names[0], name, side, int(seed)))}")
    elif options.list:
        print(json.dumps({name: trainer.task for name, trainer in trainers_of(options.names[0]).items()}))
    else:
        for name in options.names or WITH_TRAINERS:
            places = package_of(name, options.checkouts, options.path)
            compare(name, options.only, options.seeds, options.python.get(name, sys.executable), places)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
