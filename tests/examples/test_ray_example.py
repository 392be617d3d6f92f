"""The example of many actors runs as printed, on a cluster that it finds, and learns."""

import os
import subprocess
import sys

import pytest

from tests.examples.test_replay_examples import EXAMPLES

pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")


def run(cluster: str, *arguments: object) -> str:
    """What the command says; a process of its own, since its actors are classes of the main module."""
    command = [sys.executable, str(EXAMPLES / "apex_dqn_ray.py"), *map(str, arguments)]
    where = {**os.environ, "RAY_ADDRESS": cluster}
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1500, env=where)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.thorough
def test_actors_and_a_learner_run_as_a_command(cluster: str, tmp_path: object) -> None:
    said = run(cluster, "--total-steps", 1400, "--actors", 2, "--shards", 2, "--checkpoint", f"{tmp_path}/memory")
    assert "mean return of the last" in said.splitlines()[-1]


@pytest.mark.long
def test_actors_and_a_learner_learn(cluster: str) -> None:
    assert float(run(cluster, "--seed", 1).split()[-1]) > 300
