# pyright: reportMissingImports=false
"""Train Stable-Baselines3's PPO, DQN and SAC on its own buffers and on ours: same seeds, same settings.

Run it as `python -m benchmarks.training [--quick] [--out PICTURE] [--json PATH]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
import torch
from rich.console import Console

from . import machine
from .report import Result
from .suite import Session, make_parser
from .timing import make_timing

SEEDS = (0, 1, 2)
LAST_EPISODES = 20
"""Number of last episodes whose mean is "return reached"."""
TIMED = ("reset", "add", "compute_returns_and_advantage", "get", "sample")
COLOURS = {"relive": "#c1272d", "Stable-Baselines3": "#4c72b0"}


@dataclass(frozen=True)
class Task:
    """One algorithm on one environment."""

    algorithm: str
    env: str
    steps: int
    n_envs: int
    settings: dict[str, Any]


TASKS = (
    Task("PPO", "CartPole-v1", 40_000, 4, {"n_steps": 256, "batch_size": 64, "learning_rate": 1e-3}),
    Task(
        "DQN",
        "CartPole-v1",
        30_000,
        1,
        {
            "learning_rate": 5e-4,
            "buffer_size": 50_000,
            "learning_starts": 1_000,
            "batch_size": 64,
            "train_freq": 4,
            "gradient_steps": 4,
            "tau": 0.01,
            "target_update_interval": 1,
            "exploration_fraction": 0.1,
            "exploration_final_eps": 0.02,
            "policy_kwargs": {"net_arch": [128, 128]},
        },
    ),
    Task("SAC", "Pendulum-v1", 6_000, 1, {"learning_rate": 1e-3, "buffer_size": 20_000}),
)


@dataclass(frozen=True)
class Run:
    """One training."""

    task: str
    library: str
    seed: int
    steps: list[int]
    returns: list[float]
    """Return and last step of every episode."""
    buffer_seconds: float
    """CPU seconds in the buffer's methods."""
    seconds: float
    """CPU seconds of the whole training."""
    held_bytes: int

    @property
    def reached(self) -> float:
        return float(np.mean(self.returns[-LAST_EPISODES:]))


class Stopwatch:
    """Counts the CPU time in some methods of one object."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def attach(self, buffer: Any) -> None:
        for name in TIMED:
            method = getattr(buffer, name, None)
            if method is not None:
                setattr(buffer, name, self._batches(method) if name == "get" else self._call(method))

    def _call(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def measured_call(*args: Any, **kwargs: Any) -> Any:
            start = thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += thread_time() - start

        return measured_call

    def _batches(self, method: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """Wrap a generator, which runs only while the next batch is requested."""

        @wraps(method)
        def measured_call(*args: Any, **kwargs: Any) -> Iterator[Any]:
            following = self._call(iter(method(*args, **kwargs)).__next__)
            while True:
                try:
                    yield following()
                except StopIteration:
                    return

        return measured_call


def train(task: Task, library: str, seed: int, quick: bool) -> Run:
    """Run one training with the buffers of one library."""
    import stable_baselines3
    from stable_baselines3.common.buffers import ReplayBuffer, RolloutBuffer
    from stable_baselines3.common.env_util import make_vec_env

    from relive.compat import stable_baselines3 as ours

    owner = ours if library == "relive" else None
    kind = "rollout" if task.algorithm == "PPO" else "replay"
    theirs = RolloutBuffer if kind == "rollout" else ReplayBuffer
    classes = {f"{kind}_buffer_class": getattr(owner, theirs.__name__) if owner else theirs}
    env = make_vec_env(task.env, n_envs=task.n_envs, seed=seed)
    algorithm = getattr(stable_baselines3, task.algorithm)
    model = algorithm("MlpPolicy", env, seed=seed, device="cpu", **task.settings, **classes)
    watch, buffer = Stopwatch(), getattr(model, f"{kind}_buffer")
    watch.attach(buffer)
    steps: list[int] = []
    returns: list[float] = []

    def follow(local: dict[str, Any], _: dict[str, Any]) -> bool:
        for info in local["infos"]:
            if "episode" in info:
                steps.append(model.num_timesteps)
                returns.append(float(info["episode"]["r"]))
        return True

    start = thread_time()
    model.learn(task.steps // 10 if quick else task.steps, callback=follow)
    return Run(task.algorithm, library, seed, steps, returns, watch.seconds, thread_time() - start, held_bytes(buffer))


def held_bytes(buffer: Any) -> int:
    """Return the bytes of the arrays of a buffer."""
    own = getattr(buffer, "nbytes", None)
    return own or sum(value.nbytes for value in vars(buffer).values() if isinstance(value, np.ndarray))


def measure(quick: bool, console: Console) -> list[Run]:
    """Run every task with both libraries, alternating."""
    torch.set_num_threads(1)
    runs = []
    for task in TASKS:
        for seed in SEEDS:
            for library in COLOURS:
                runs.append(train(task, library, seed, quick))
                console.print(f"{task.algorithm} on {library}, seed {seed}: return {runs[-1].reached:,.0f}")
    return runs


def make_results(runs: Sequence[Run]) -> Iterator[Result]:
    """Return a case per task: CPU seconds in the buffer during a whole training, by seed."""
    for task in TASKS:
        chosen = [run for run in runs if run.task == task.algorithm]
        result = Result(f"training: time in the buffer, {task.algorithm} on {task.env}", [])
        for library in COLOURS:
            seconds = [run.buffer_seconds for run in chosen if run.library == library]
            result.timings.append(make_timing(library, "ours" if library == "relive" else "peer", seconds))
        yield result


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw a panel per task: every run as a thin line, the mean of the seeds as a thick one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, task in zip(figure.subplots(1, len(TASKS)), TASKS, strict=True):
        last = max(run.steps[-1] for run in runs if run.task == task.algorithm)
        grid = np.linspace(0, last, 200)
        for library, colour in COLOURS.items():
            curves = [_curve(run, grid) for run in runs if (run.task, run.library) == (task.algorithm, library)]
            for curve in curves:
                axes.plot(grid, curve, color=colour, linewidth=0.8, alpha=0.35)
            axes.plot(grid, np.mean(curves, 0), color=colour, linewidth=2.4, label=f"buffers of {library}")
        axes.set(title=f"{task.algorithm}, {task.env}", xlabel="environment steps", ylabel="return of an episode")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.locator_params(axis="x", nbins=5)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _curve(run: Run, grid: np.ndarray) -> np.ndarray:
    """Return the mean return of the last episodes before each step of the grid."""
    sums = np.concatenate([[0.0], np.cumsum(run.returns)])
    ended = np.maximum(np.searchsorted(run.steps, grid, side="right"), 1)
    first = np.maximum(ended - LAST_EPISODES, 0)
    return (sums[ended] - sums[first]) / (ended - first)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, write the figures, draw the curves."""
    parser = make_parser("training", __doc__ or "")
    parser.add_argument("--out", type=Path, help="draw learning curves there, as docs/images/stable_baselines3.png")
    options = parser.parse_args(arguments)
    session = Session.create("training", options)
    runs = measure(options.quick, session.console)
    session.about["peers"] = {"Stable-Baselines3": machine.installed_version("stable-baselines3")}
    if options.out:
        draw(runs, options.out)
    return session.finish(
        [session.compare(result) for result in make_results(runs)], runs=[asdict(run) for run in runs]
    )


if __name__ == "__main__":
    raise SystemExit(main())
