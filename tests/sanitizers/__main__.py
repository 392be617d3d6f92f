"""Build the native core with a sanitizer, check that it reports a planted bug, and run tests that must cause no report.

    python -m tests.sanitizers address|undefined|thread [pytest arguments]

The module is built in build/sanitize-<name> and imported from there. An installed module is not changed.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = ("tests/kernels", "tests/buffers/test_threads.py")
EVERYTHING = (
    *KERNELS,
    "tests/estimators",
    "tests/faults",
    "tests/schema/test_exporters.py",
    "tests/replay/test_buffer.py",
    "tests/replay/test_write_back.py",
    "tests/rollout/test_recurrent.py",
    "tests/buffers/test_state.py",
    "tests/replay/views",
)


@dataclass(frozen=True)
class Sanitizer:
    """Settings of one sanitizer for a Python that was built without it."""

    planted_bug: str
    """Name of the function in `planted_bugs.cpp` that the sanitizer must report."""
    preload: tuple[str, ...]
    """Libraries to load first. libstdc++ is among them because the sanitizer intercepts its exceptions."""
    variable: str
    options: str
    tests: tuple[str, ...]


SANITIZERS = {
    # Leaks are not checked, because Python never frees some memory. Tests request more memory than there is.
    "address": Sanitizer(
        "bounds",
        ("libasan.so", "libstdc++.so"),
        "ASAN_OPTIONS",
        "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=4096",
        EVERYTHING,
    ),
    "undefined": Sanitizer("overflow", (), "UBSAN_OPTIONS", "print_stacktrace=1", EVERYTHING),
    "thread": Sanitizer(
        "race",
        ("libtsan.so", "libstdc++.so"),
        "TSAN_OPTIONS",
        f"suppressions={Path(__file__).parent}/thread.supp",
        KERNELS,
    ),
}


def build(name: str, folder: Path) -> Path:
    """Build the package with a sanitized native core; return the folder to import it from."""
    site, tree = folder / "site", folder / "cmake"
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(ROOT / "src", site, ignore=shutil.ignore_patterns("__pycache__", "_native*.so"))
    settings = {
        "CMAKE_BUILD_TYPE": "RelWithDebInfo",
        "CMAKE_INSTALL_PREFIX": site,
        "Python_EXECUTABLE": sys.executable,
        "RELIVE_SANITIZE": name,
    }
    # Use the cmake of this environment, if it has one.
    tools = os.environ | {"PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))}
    for step in (
        ["-S", ROOT, "-B", tree, *(f"-D{name}={value}" for name, value in settings.items())],
        ["--build", tree, "--parallel", "2"],
        ["--install", tree],
    ):
        subprocess.run(["cmake", *step], check=True, stdout=subprocess.DEVNULL, env=tools)
    return site


def find_library(name: str) -> str:
    """Return the path of a library of the compiler."""
    compiler = subprocess.run(["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True)
    return compiler.stdout.strip()


def run(sanitizer: Sanitizer, folder: Path, *command: str) -> tuple[int, list[Path]]:
    """Run a Python command; return its exit code and the files of its reports."""
    reports = folder / "reports"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir(parents=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (folder / "site", ROOT))),
        # A sanitizer watches the borders of blocks of malloc, not those of Python's own allocator.
        "PYTHONMALLOC": "malloc",
        # Sanitizers do not see how the threads of libgomp synchronise.
        "OMP_NUM_THREADS": "1",
        "LD_PRELOAD": " ".join(map(find_library, sanitizer.preload)),
        sanitizer.variable: f"{sanitizer.options}:log_path={reports}/report",
    }
    # ThreadSanitizer needs memory at fixed addresses.
    command = ("setarch", platform.machine(), "-R", sys.executable, *command)
    process = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    return process.returncode, [path for path in sorted(reports.iterdir()) if not _is_refusal(path.read_text())]


def _is_refusal(report: str) -> bool:
    """Whether a report is only about a failed allocation, which is an ordinary error."""
    lines = [line for line in report.splitlines() if line.strip()]
    return all("failed to allocate" in line for line in lines)


def main(name: str, *pytest: str) -> int:
    sanitizer, folder = SANITIZERS[name], ROOT / "build" / f"sanitize-{name}"
    build(name, folder)
    bug = sanitizer.planted_bug
    call_bug = f"import ctypes; from relive.kernels import _native; ctypes.CDLL(_native.__file__).{bug}()"
    code, reports = run(sanitizer, folder, "-c", call_bug)
    if not code or not reports:
        print(f"{name}: the planted bug ({bug}) was not reported")
        return 1
    print(f"{name}: the planted bug ({bug}) was reported:")
    print("  " + next(line for line in reports[0].read_text().splitlines() if "Sanitizer" in line or "error" in line))
    code, reports = run(sanitizer, folder, "-m", "pytest", "-p", "no:cacheprovider", *(pytest or sanitizer.tests))
    for report in reports:
        print(report.read_text())
    print(f"{name}: {len(reports)} reports")
    return code or len(reports) > 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
