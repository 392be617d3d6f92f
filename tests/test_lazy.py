"""`import relive` loads few packages; others are imported on first use."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tensordict import TensorDict

import relive as rl
from relive import lazy


def run_program(program: str) -> str:
    """Run a program in a new interpreter and return its output."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(program)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


LOADED = {"farama_notifications", "gymnasium"}
"""Third-party packages that `import relive` loads, except torch, numpy and their dependencies."""

COLLECTOR = """
    import sys, tempfile
    import numpy, numpy.random, torch
    loaded = set(sys.modules)
    import relive as rl
    packages = {name.partition(".")[0] for name in sys.modules.keys() - loaded}
    packages -= {name.partition(".")[0] for name in loaded} | sys.stdlib_module_names | {"relive"}
    print(*sorted(name for name in packages if not name.startswith("_")))

    step = {"reward": 1.0, "terminated": False, "truncated": False}
    replay = rl.ReplayBuffer(8, obs={"a": 2}, action=(), sampler=rl.Prioritized(), seed=0)
    rollout = rl.RolloutBuffer(2, 1, obs=2, action=())
    distillation = rl.DistillationBuffer(8, obs=2, action=())
    for _ in range(3):
        replay.add(obs={"a": [0.0, 1.0]}, action=0.5, next_obs={"a": [1.0, 2.0]}, **step)
    replay.update_priority(replay.ids(), [2.0] * 3)
    rollout.add(obs=[[0.0, 1.0]], action=[0.5], reward=[1.0], terminated=[False], truncated=[False], value=[0.0])
    distillation.add([0.0, 1.0], 0.5)
    for buffer in replay, rollout, distillation:
        buffer.check()
        with tempfile.TemporaryDirectory() as folder:
            buffer.save(folder)
            rl.load(folder)
    assert "tensordict" not in sys.modules
"""


def test_an_import_loads_few_packages_and_a_process_that_only_adds_loads_no_others() -> None:
    assert set(run_program(COLLECTOR).split()) == LOADED


READERS = """
    import sys, threading
    import relive as rl

    class NoTensorDict:
        '''Fails to import tensordict, once another thread has used every buffer.'''
        def find_spec(self, name, path=None, target=None):
            if name == "tensordict":
                other = threading.Thread(target=lambda: [len(buffer) for buffer in buffers], daemon=True)
                other.start()
                other.join(20)
                if other.is_alive():
                    raise AssertionError("the lock is taken while tensordict is imported")
                raise ImportError("no tensordict today")

    step = {"reward": 1.0, "terminated": False, "truncated": False}
    def make_replay(sampler):
        replay = rl.ReplayBuffer(64, obs=1, action=(), sampler=sampler, seed=0)
        for i in range(20):
            replay.add([i], 0.5, next_obs=[i + 1], **step)
        return replay
    replay, twin = make_replay(None), make_replay(None)
    prioritized, prioritized_twin = make_replay(rl.Prioritized()), make_replay(rl.Prioritized())
    rollout = rl.RolloutBuffer(2, None, obs={"a": 1}, action=(), seed=0)
    for i in range(2):
        rollout.add(obs={"a": [i]}, action=0.5, value=0.0, **step)
    rollout.compute_advantage(0.0)
    distillation = rl.DistillationBuffer(8, obs=1, action={"a": ()})
    distillation.add([0.0], {"a": 0.5})
    mixture = rl.Mixture({"a": replay, "b": prioritized}, [1, 1])
    limit = rl.RateLimit(replay, samples_per_insert=1.0, min_size=1, tolerance=100)
    buffers = replay, prioritized, rollout, distillation, mixture
    readers = {
        "sample": lambda: replay.sample(4),
        "sample of a view": lambda: replay.sample(4, rl.Sequence(2)),
        "prioritized": lambda: prioritized.sample(4),
        "read": lambda: replay.read([0]),
        "[]": lambda: replay[0],
        "episodes": lambda: list(replay.episodes()),
        "columns": lambda: replay.columns,
        "mixture": lambda: mixture.sample(4),
        "limit": lambda: limit.sample(4),
        "prefetch": lambda: rl.prefetch(replay, 4),
        "minibatches": lambda: rollout.minibatches(2),
        "sequences": lambda: rollout.sequences(2),
        "data": lambda: rollout.data,
        "rollout columns": lambda: rollout.columns,
        "env_major": lambda: rollout.env_major(),
        "lend": lambda: rollout.lend(),
        "final_obs": lambda: rollout.final_obs,
        "draw": lambda: distillation.sample(4),
        "epochs": lambda: distillation.epochs(1),
        "row": lambda: distillation[0],
        "mix": lambda: distillation.mix({"a": 0.0}, {"a": 1.0}, 0.5),
        "fill": lambda: distillation.fill(replay),
    }
    sys.meta_path.insert(0, NoTensorDict())
    for name, reader in readers.items():
        try:
            reader()
        except ImportError:
            print(name)
    sys.meta_path.pop(0)
    assert (replay.sample(16)["index"] == twin.sample(16)["index"]).all(), "a failed import has drawn rows"
    assert (prioritized.sample(16)["index"] == prioritized_twin.sample(16)["index"]).all()
    print(len(readers))
"""


def test_every_reader_imports_tensordict_before_it_takes_the_lock_or_draws() -> None:
    *imported, count = run_program(READERS).splitlines()
    assert len(imported) == int(count), imported


def public_functions(thing: Any) -> Iterator[Callable[..., Any]]:
    """Yield a public function itself, or the public methods and properties of a class."""
    if not inspect.isclass(thing):
        yield thing
        return
    for name, member in vars(thing).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if inspect.isfunction(function) and (not name.startswith("_") or name in ("__init__", "__getitem__")):
            yield function


@pytest.mark.parametrize("name", [name for name in rl.__all__ if name != "kernels"])
def test_type_hints_of_public_names_can_be_read(name: str) -> None:
    thing = getattr(rl, name)
    if inspect.isclass(thing):
        typing.get_type_hints(thing)
    for function in public_functions(thing):
        typing.get_type_hints(function)


def test_type_hints_resolve_to_tensordict() -> None:
    for sample in (rl.ReplayBuffer.sample, rl.Mixture.sample, rl.RateLimit.sample, rl.DistillationBuffer.sample):
        hints = typing.get_type_hints(sample)
        assert hints["return"] is TensorDict
        assert hints["out"] == TensorDict | None


def test_an_unknown_lazy_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="relive.lazy.*TensorDic"):
        _ = lazy.TensorDic  # pyright: ignore[reportAttributeAccessIssue]
