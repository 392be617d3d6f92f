"""Check and time relive on a GPU: `python -m relive.gpu_report` writes a Markdown page and a JSON file.

Takes under ten minutes on a small GPU. Nothing is sent: please attach both files to an issue. Without a GPU,
`--device interpreter` runs the supported sections at small sizes in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

MAX_SECONDS = 540.0
"""Time after which no further section starts."""


def machine(place: Any) -> Iterator[dict[str, Any]]:
    """Versions, driver and device."""
    import torch  # noqa: PLC0415 (after TRITON_INTERPRET is set)

    import relive as rl  # noqa: PLC0415
    from relive import kernels  # noqa: PLC0415

    with place.kernels():
        serving = kernels.serving([torch.zeros(1, device=place.device)])
    triton = sys.modules.get("triton")
    facts = {
        "relive": rl.__version__, "torch": torch.__version__, "CUDA or ROCm": torch.version.cuda or torch.version.hip,
        "Triton": getattr(triton, "__version__", None), "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}", "driver": _driver(), "kernels": serving,
    }  # fmt: skip
    if place.is_gpu:
        about = torch.cuda.get_device_properties(place.device)
        facts |= {"GPU": about.name, "GPUs": torch.cuda.device_count(), "processors": about.multi_processor_count}
        facts |= {"memory": f"{about.total_memory >> 20:,} MiB", "capability": f"{about.major}.{about.minor}"}
        facts["architecture"] = getattr(about, "gcnArchName", None)
    yield from ({"what": name, "value": value} for name, value in facts.items() if value is not None)


def _driver() -> str | None:
    commands = (
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        ["rocm-smi", "--showdriverversion"],
    )
    for command in commands:
        if shutil.which(command[0]) is not None:
            words = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20).stdout.split()
            return words[-1] if words else None
    return None


def sections() -> dict[str, Callable[[Any], Iterator[dict[str, Any]]]]:
    """The sections of the report, in order."""
    from relive.gpu_report import checking, timing  # noqa: PLC0415 (after TRITON_INTERPRET is set)

    return {
        "Machine": machine,
        "First calls": checking.compiling,
        "Rows": checking.correctness,
        "Priorities": checking.priorities,
        "Draws": checking.draws,
        "Waits": checking.waits,
        "CUDA graphs": checking.graphs,
        "Two streams": checking.streams,
        "Two devices": checking.devices,
        "Bandwidth": timing.bandwidth,
        "Replay": timing.replay_calls,
        "Images": timing.images,
        "Trees": timing.trees,
        "Rollouts": timing.rollouts,
        "Others": timing.others,
    }


def section(title: str, run: Callable[[Any], Iterator[dict[str, Any]]], place: Any) -> dict[str, Any]:
    """Run a section. Rows before a failure are kept."""
    from relive.gpu_report.place import NotHere  # noqa: PLC0415

    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {"title": title, "about": (run.__doc__ or "").strip(), "rows": rows, "result": "passed"}
    start = time.perf_counter()
    try:
        rows.extend(run(place))  # keeps the rows yielded before a failure
        if any("WAITS" in str(row.get("result")) for row in rows):
            result["result"] = "FAILED"
    except NotHere as reason:
        result["result"] = f"left out: {reason}"
    except Exception as error:  # an error is part of the report
        result |= {"result": "FAILED", "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    result["seconds"] = round(time.perf_counter() - start, 1)
    return result


def page(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = [f"# relive on {report['name']}", "", f"{report['date']}, {report['seconds']:.0f} s.", ""]
    lines += ["| section | result | s |", "|---|---|--:|"]
    lines += [f"| {each['title']} | {each['result']} | {each['seconds']} |" for each in report["sections"]]
    for each in report["sections"]:
        lines += ["", f"## {each['title']}", "", each["about"], ""]
        names = list(dict.fromkeys(name for row in each["rows"] for name in row))
        if names:
            lines += [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
            lines += [f"| {' | '.join(str(row.get(name, '–')) for name in names)} |" for row in each["rows"]]
        if "error" in each:
            lines += ["", f"**{each['error']}**", "", "```", each["traceback"].rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every section. Returns 1 if one failed, 2 without a device."""
    parser = argparse.ArgumentParser(prog="python -m relive.gpu_report", description=__doc__)
    parser.add_argument("--device", default="cuda", help='a device such as "cuda:0", or "interpreter"')
    parser.add_argument("--out", type=Path, default=Path("relive-gpu-report"), help="the files, without .md and .json")
    parser.add_argument("--fasttd3", metavar="PATH", help="the file fast_td3_utils.py of a clone of FastTD3")
    options = parser.parse_args(arguments)
    is_interpreted = options.device == "interpreter"
    if is_interpreted:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads this when it is imported
    import torch  # noqa: PLC0415

    from relive.gpu_report.place import SMALL, Place, Sizes  # noqa: PLC0415

    if not is_interpreted and not torch.cuda.is_available():
        _print(f"gpu_report: expected a GPU that torch {torch.__version__} sees, got none. Pass --device interpreter.")
        return 2
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # an empty cache: the first call of each kernel compiles it
        place = Place(torch.device("cpu" if is_interpreted else options.device), SMALL if is_interpreted else Sizes())
        place.fasttd3 = options.fasttd3
        done = []
        for title, run in sections().items():
            if time.perf_counter() - start > MAX_SECONDS:
                done.append({"title": title, "about": "", "rows": [], "result": "left out: no time", "seconds": 0.0})
                continue
            done.append(section(title, run, place))
            _print(f"{title}: {done[-1]['result']} ({done[-1]['seconds']} s)")
    name = "Triton's interpreter" if is_interpreted else torch.cuda.get_device_name(place.device)
    report = {"name": name, "date": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC", "sections": done}
    report["seconds"] = time.perf_counter() - start
    options.out.with_suffix(".md").write_text(page(report), encoding="utf-8")
    options.out.with_suffix(".json").write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")
    _print(f"Written to {options.out}.md and {options.out}.json. Please send both with an issue, good or bad.")
    return int(any(each["result"] == "FAILED" for each in done))


if __name__ == "__main__":
    raise SystemExit(main())
