"""Time the calls of training loops on a device, beside other libraries: `python -m benchmarks.devices`.

Each call is timed alone: until the device is done, and in brackets until the call returns. It is prepared anew for each
round, and the libraries take turns. The table is printed and written as a page.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console

import relive as rl
from relive import kernels

from . import launch_peers, launches
from .launch_peers import ACTION, BATCH, CALLS, NUM_ENVS, OBS, STEPS, Calls
from .suite import NO_PEERS, RESULTS, describe, file_name, make_parser

ROUNDS, QUICK_ROUNDS = 50, 5
Times = dict[str, dict[str, tuple[float, float]]]
"""By call and library: µs until the device is done, and until the call returns."""


class Library(NamedTuple):
    """A library and the context in which its calls are prepared and run."""

    title: str
    calls: Calls
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext


def missing(device: str) -> str | None:
    """Return the reason why a device is missing, or None."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        return f"expected a device {device}, got none ({reason}; torch {torch.__version__}). Run it where there is one."
    return None


def libraries(device: str, fasttd3: Path | None) -> Iterator[Library]:
    """Yield relive with the device's kernels, relive with torch ops, and the installed peers."""
    served = kernels.choose_backend([torch.zeros(1, device=device)])
    yield Library(f"relive ({served})", launches.ours(device))
    if served != "torch":
        yield Library("relive (torch ops)", launches.ours(device), kernels.force_torch)
    for title, calls in launch_peers.installed_peers(fasttd3, device):
        yield Library(title, calls)


def measure_calls(entrants: Sequence[Library], device: str, rounds: int) -> Times:
    """Return the medians of every call of every library; a failing one is reported and omitted."""
    wait, rng, found = _get_synchronize(device), np.random.default_rng(0), {}
    for name in CALLS:
        samples: dict[str, list[tuple[float, float]]] = {
            library.title: [] for library in entrants if name in library.calls
        }
        for _ in range(rounds + 1):
            for place in rng.permutation(len(entrants)):
                title, calls, inside = entrants[place]
                if title in samples:
                    try:
                        with inside():
                            samples[title].append(_time_once(calls[name](), wait))
                    except Exception as error:  # a library that breaks must not end the run
                        print(f"{title}: {name}: {type(error).__name__}: {error}")
                        del samples[title]
        # The first round allocates and compiles.
        found[name] = {title: tuple(map(median, zip(*every[1:], strict=True))) for title, every in samples.items()}
    return found


def _time_once(call: Callable[[], object], wait: Callable[[], None]) -> tuple[float, float]:
    wait()
    start = perf_counter()
    call()
    returned = perf_counter()
    wait()
    return 1e6 * (perf_counter() - start), 1e6 * (returned - start)


def _get_synchronize(device: str) -> Callable[[], None]:
    module = getattr(torch, torch.device(device).type, None)
    return getattr(module, "synchronize", lambda: None)


def table(times: Times) -> Iterator[str]:
    """Yield the lines of a table with a row per call."""
    titles = list(dict.fromkeys(title for found in times.values() for title in found))
    yield f"| µs | {' | '.join(titles)} |"
    yield "|---|" + "--:|" * len(titles)
    for name, found in times.items():
        cells = (f"{found[title][0]:,.0f} ({found[title][1]:,.0f})" if title in found else "–" for title in titles)
        yield f"| {name} | {' | '.join(cells)} |"


def page(times: Times, device: str, about: dict[str, Any]) -> str:
    """Return the measurements as a Markdown page."""
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else about["machine"]["cpu"]
    lines = (
        f"# Calls on {name} (`{device}`)",
        "",
        f"{about['date']}, relive {rl.__version__}, torch {torch.__version__}. {NUM_ENVS:,} environments, obs {OBS}, "
        f"action {ACTION}, batches of {BATCH:,} rows, rollouts of {STEPS} steps. Medians in µs, each call alone: until "
        "the device was done, and in brackets until the call returned."
        + (" A quick run: for a look, not for claims." if about["quick"] else ""),
        "",
        *table(times),
    )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Time every call, print the table, write the page and the results."""
    parser = make_parser("devices", __doc__ or "")
    parser.add_argument("--device", default="cuda", help="a torch device (default: cuda)")
    parser.add_argument("--fasttd3", metavar="PATH", type=Path, help="the file fast_td3_utils.py of a clone of FastTD3")
    parser.add_argument("--page", metavar="FILE", type=Path, help=f"where to write the page (default: {RESULTS}/…md)")
    options = parser.parse_args(arguments)
    reason = missing(options.device)
    if reason is not None:
        print(f"devices: {reason}")
        return 2
    about = describe("devices", NO_PEERS, options.quick) | {"device": options.device}
    entrants = list(libraries(options.device, options.fasttd3))
    times = measure_calls(entrants, options.device, QUICK_ROUNDS if options.quick else ROUNDS)
    path = options.json or RESULTS / file_name("devices", about)
    text, target = page(times, options.device, about), options.page or path.with_suffix(".md")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about, "times": times}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    target.write_text(text, encoding="utf-8")
    console = Console(width=200, highlight=False)
    console.print(text, markup=False, soft_wrap=True)
    console.print(f"written to {target} and {path}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
