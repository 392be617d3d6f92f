"""Tests of Triton's backend under its interpreter, compared with the native core."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import relive as rl
from relive_conformance import case
from relive_conformance.adapters import relive as ours
from relive_conformance.outcome import PASSES
from tests.kernels.triton.interpreter import in_every_order, interpreted, orders, programs_in_order, quick_arithmetic
from tests.kernels.triton.launches import WAITS, Launches
from tests.replay.recordings import (
    VIEWS,
    Shape,
    assert_same_batch,
    assert_same_batches,
    assert_same_rows,
    play,
    same_bits,
)  # fmt: skip
from tests.tiers import select

pytest.importorskip("triton", reason="needs Triton: pip install 'relive[triton]'")

SHAPES = {
    "floats": Shape(3, 6, 3, {}),
    "one environment": Shape(3, 5, None, {}),
    "NEXT_STEP": Shape(2, 5, 3, {"autoreset": "NEXT_STEP"}),
    "SAME_STEP": Shape(2, 5, 2, {"autoreset": "SAME_STEP"}),
    "stored": Shape(2, 4, 3, {"next_obs": "stored"}),
    "stored, NEXT_STEP": Shape(2, 4, 2, {"next_obs": "stored", "autoreset": "NEXT_STEP"}),
    "one row": Shape(1, 1, 2, {}),
    "nested": Shape(
        {"camera": rl.Field((3, 2), torch.uint8), "wheel": {"left": 2, "right": rl.Field((), torch.float64)}}, 5, 2,
        {"action": rl.Field((), torch.int64), "reward": {"fox": (), "hare": 2}},
    ),
    "all dtypes": Shape(
        rl.Field(3, torch.float16), 5, 2,
        {"action": rl.Field(2, torch.bfloat16), "extra": {
            str(dtype).removeprefix("torch."): rl.Field(2, dtype)
            for dtype in (torch.bool, torch.int8, torch.uint16, torch.uint32, torch.uint64, torch.complex64,
                          torch.complex128)
        }},
    ),
    "stacks": Shape(rl.Stacked(rl.Field((2, 3), torch.uint8), 3), 6, 2, {}),
    "two frames, padded by zeros": Shape(
        {"frame": rl.Stacked(rl.Field((2, 3), torch.uint8), 2, 0, pad="zero"), "depth": rl.Stacked(2, 4)}, 6, 2,
        {"autoreset": "NEXT_STEP"},
    ),
    "carried": Shape(2, 6, 2, {"extra": {"state": rl.Carry((2, 2)), "latent": rl.Mutable(rl.Carry(3))}}),
    "a wide row": Shape(rl.Field((40, 40), torch.uint8), 4, 2, {}),
}  # fmt: skip
ORDERED = [name for name, shape in SHAPES.items() if shape.options.get("next_obs") != "stored"]


@pytest.fixture
def _small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split work that fits in one program into several programs."""
    from relive.kernels.triton import launching, read  # noqa: PLC0415 (which need Triton)

    monkeypatch.setattr(launching, "MAX_INTERPRETED", 2)
    monkeypatch.setattr(read, "CHUNK", 1024)


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with quick_arithmetic(), warnings.catch_warnings():
        warnings.simplefilter("ignore", rl.DataWarning)
        yield


def make_pair(shape: Shape, **more: Any) -> tuple[rl.ReplayBuffer, rl.ReplayBuffer]:
    """Make equal buffers of the native core and of Triton."""
    native = shape.buffer(seed=0, **more)
    with rl.kernels.force("triton"):
        return native, shape.buffer(seed=0, **more)


def load_replay(path: Path) -> rl.ReplayBuffer:
    replay = rl.load(path)
    assert isinstance(replay, rl.ReplayBuffer)
    return replay


def select_views(shape: Shape) -> tuple[Any, ...]:
    return VIEWS[:1] if shape.options.get("next_obs") == "stored" else VIEWS


class TestRows:
    @pytest.mark.parametrize("name", select("floats", "stored, NEXT_STEP", of=SHAPES))
    @pytest.mark.usefixtures("_small_programs")
    def test_any_history_is_stored_and_read_as_by_the_native_core(self, name: str) -> None:
        native, triton = make_pair(SHAPES[name])
        play([native, triton], seed=len(name), length=14)
        assert_same_rows(native, triton)
        triton.check()
        with programs_in_order(orders(2)[1]):
            assert_same_batches(native, triton, select_views(SHAPES[name]))

    @pytest.mark.thorough
    @pytest.mark.usefixtures("_small_programs")
    @settings(max_examples=40, deadline=None)
    @given(
        name=st.sampled_from(sorted(SHAPES)),
        seed=st.integers(0, 2**20),
        rows=st.integers(1, 7),
        order=st.integers(0, 3),
    )
    def test_any_shape_any_history_any_order_of_programs(self, name: str, seed: int, rows: int, order: int) -> None:
        shape = SHAPES[name]._replace(rows=rows)
        with programs_in_order(orders(4)[order]):
            native, triton = make_pair(shape)
            play([native, triton], seed, length=10)
            assert_same_rows(native, triton)
            triton.check()
            assert_same_batches(native, triton, select_views(shape))

    def test_views_read_by_torch_ops_see_rows_that_were_written_between_two_batches(self) -> None:
        native, triton = make_pair(SHAPES["floats"])
        for seed in range(3):
            play([native, triton], seed=seed, length=6)
            assert_same_batches(native, triton, [rl.Window(obs=(-1, 0))])
            triton.check()

    @pytest.mark.thorough
    @pytest.mark.usefixtures("_small_programs")
    def test_a_write_is_the_same_in_every_order_of_programs(self) -> None:
        shape = SHAPES["two frames, padded by zeros"]._replace(num_envs=5)

        def written() -> Any:
            with interpreted():
                replay = shape.buffer(seed=0, sampler=rl.Prioritized())
                play([replay], seed=3, length=5, calls="ae")
                memory = replay.storage.rows
                changed: Any = replay.storage.changed_slots()
                return [tensor.clone() for tensor in (*memory.tensors, memory.num_invalid_stacks, *changed)]

        in_every_order(written, 3)

    def test_strided_and_transposed_inputs_are_stored_as_they_look(self) -> None:
        native, triton = make_pair(Shape((2, 3), 4, 4, {}))
        obs = torch.randn(3, 2, 4).permute(2, 1, 0)
        flags = torch.zeros(4, 2, dtype=torch.bool)[:, 0]
        for replay in (native, triton):
            replay.add(obs, torch.randn(4, 4).zero_()[:, ::2], torch.arange(8.0)[::2], flags, ~flags, obs + 1)
        assert not obs.is_contiguous()
        assert_same_rows(native, triton)
        assert_same_batches(native, triton)

    def test_shapes_and_dtypes_are_refused_at_once_and_nothing_changes(self) -> None:
        native, triton = make_pair(SHAPES["floats"])
        play([native, triton], seed=0, length=3)
        good = {"action": np.zeros((3, 2)), "reward": np.zeros(3), "truncated": np.zeros(3, bool)}
        for wrong in ({"obs": np.zeros((3, 4))}, {"obs": np.zeros((2, 3))}, {"terminated": np.zeros(3)}):
            step = {"obs": np.zeros((3, 3)), "terminated": np.zeros(3, bool), "next_obs": np.ones((3, 3)), **good}
            for replay in (native, triton):
                with pytest.raises(rl.SchemaError):
                    replay.add(**(step | wrong))
        assert_same_rows(native, triton)

    def test_broken_stacks_are_counted_until_somebody_checks(self, tmp_path: Path) -> None:
        with interpreted():
            replay = Shape(rl.Stacked(2, 3, 0), 4, 2, {}).buffer()
            for step in range(2):
                frames = torch.arange(12.0).view(2, 3, 2) + 100 * step
                flags = torch.zeros(2, dtype=torch.bool)
                replay.add(frames, torch.zeros(2, 2), torch.zeros(2), flags, flags, frames + 50)
            with pytest.raises(rl.InvariantError, match="4 steps with other stacks"):
                replay.check()
            with pytest.warns(rl.DataWarning, match="4 steps with other stacks"):
                assert replay.save(tmp_path) == 1


class TestRewards:
    @pytest.mark.parametrize("dtype", select(torch.bfloat16, torch.float64, of=[
        torch.float16, torch.bfloat16, torch.float32, torch.float64]))  # fmt: skip
    def test_sums_are_rounded_as_by_torch_ops_and_the_native_core(self, dtype: torch.dtype) -> None:
        shape = Shape(1, 12, 2, {"reward": rl.Field(3, dtype)})
        native, triton = make_pair(shape)
        with rl.kernels.force("torch"):
            by_torch = shape.buffer()
        play([native, triton, by_torch], seed=1, length=12, calls="e")
        views = [rl.NStep(n, 0.97) for n in (1, 4, 12)]
        assert_same_batches(native, triton, views)
        assert_same_batches(by_torch, triton, views)

    @pytest.mark.parametrize("view", [rl.NStep(5, 0.9), rl.Sequence(3, 2)])
    def test_steps_that_no_tile_holds_are_read_by_torch_ops(self, view: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from relive.replay import triton_backend  # noqa: PLC0415 (which needs Triton)

        monkeypatch.setattr(triton_backend, "MAX_STEPS", 4)
        native, triton = make_pair(Shape(1, 6, 2, {}))
        play([native, triton], seed=1, length=6, calls="e")
        assert_same_batches(native, triton, [view])


class TestLaunches:
    """Tests of the number of launches per call."""

    CALLS: ClassVar[dict[str, tuple[Any, Callable[[rl.ReplayBuffer], Callable[[], object]], list[str]]]] = {
        "add": (None, lambda replay: partial(replay.add, **make_step(replay)), ["write_kernel"]),
        "extend": (None, lambda replay: partial(replay.extend, make_block(replay)), ["write_kernel"]),
        "uniform": (None, lambda replay: partial(replay.sample, 8), ["draw_rows_kernel", "read_kernel"]),
        "n-step": (
            None, lambda replay: partial(replay.sample, 8, rl.NStep(3, 0.9)), ["draw_rows_kernel", "read_kernel"]
        ),
        "sequences": (
            None, lambda replay: partial(replay.sample, 8, rl.Sequence(16, 4)),
            ["draw_rows_kernel", "windows_kernel", "read_kernel"],
        ),
        "prioritized add": (
            rl.Prioritized(), lambda replay: partial(replay.add, **make_step(replay)),
            ["write_kernel", "set_written_slots_kernel", "renew_subtrees_kernel"],
        ),
    }  # fmt: skip

    @pytest.mark.parametrize("name", CALLS)
    def test_a_call_is_these_launches(self, name: str) -> None:
        sampler, call_of, kernels = self.CALLS[name]
        with interpreted():
            replay = rl.ReplayBuffer(80, 3, 2, num_envs=4, sampler=sampler, seed=0)
            for _ in range(2):
                replay.add(**make_step(replay))
            call = call_of(replay)
            with Launches() as launches:
                call()
        assert launches.names == kernels

    @pytest.mark.parametrize("name", ["cut", "clear", "update_priority", "hindsight", "env_ids"])
    def test_no_call_waits(self, name: str) -> None:
        calls: dict[str, Callable[[], object]] = {
            "cut": lambda: replay.cut([1]),
            "clear": lambda: replay.clear(),  # noqa: PLW0108 (it is made below)
            "update_priority": lambda: replay.update_priority(batch["index"], torch.rand(8)),
            "hindsight": lambda: replay.sample(8, rl.Hindsight("a", "b", lambda a, g, _: (a[:, 0], a[:, 0] > g[:, 0]))),
            "env_ids": lambda: replay.add(**make_step(replay, 2), env_ids=[0, 2]),
        }
        with interpreted():
            replay = rl.ReplayBuffer(80, {"a": 3, "b": 3}, 2, num_envs=4, sampler=rl.Prioritized(), seed=0)
            replay.add(**make_step(replay))
            batch = replay.sample(8)
            # The first call makes a tensor of the environments, which later calls reuse.
            replay.add(**make_step(replay, 2), env_ids=[0, 2])
            with Launches() as launches:
                calls[name]()
        assert not WAITS & set(launches.names)


def make_block(replay: rl.ReplayBuffer, steps: int = 3) -> dict[str, Any]:
    return {name: _repeated(value, steps) for name, value in make_step(replay).items()}


def _repeated(value: Any, steps: int) -> Any:
    if isinstance(value, dict):
        return {name: _repeated(leaf, steps) for name, leaf in value.items()}
    return torch.stack([value] * steps)


def make_step(replay: rl.ReplayBuffer, envs: int | None = None) -> dict[str, Any]:
    """Make a step of all environments, or of `envs` environments."""
    envs = replay.num_envs if envs is None else envs
    assert envs is not None
    obs: Any = [torch.zeros(envs, 3), torch.ones(envs, 3)]
    if replay._schema.paths[0] != ("obs",):
        obs = [{"a": torch.zeros(envs, 3) + at, "b": torch.ones(envs, 3) + at} for at in (0, 1)]
    flags = {name: torch.zeros(envs, dtype=torch.bool) for name in ("terminated", "truncated")}
    return {"obs": obs[0], "action": torch.zeros(envs, 2), "reward": torch.zeros(envs), **flags, "next_obs": obs[1]}


class TestOut:
    @pytest.mark.parametrize("view", [rl.Transition(), rl.NStep(2, 0.9), rl.Sequence(2, 1)])
    @pytest.mark.parametrize("sampler", select(None, of=[None, rl.Prioritized()]))
    def test_a_batch_is_filled_where_it_is(self, view: Any, sampler: Any) -> None:
        with interpreted():
            fresh, filled = (rl.ReplayBuffer(40, 2, (), num_envs=2, sampler=sampler, seed=5) for _ in range(2))
            play([fresh, filled], seed=0, length=6, calls="e")
            out = filled.sample(6, view)
            addresses = [leaf.data_ptr() for leaf in out.values(True, True)]
            assert_same_batch(fresh.sample(6, view), out)
            with Launches() as launches:
                assert filled.sample(6, view, out=out) is out
            assert not any("copy" in name for name in launches.names)
            assert [leaf.data_ptr() for leaf in out.values(True, True)] == addresses
            assert_same_batch(fresh.sample(6, view), out)

    def test_what_does_not_fit_is_refused_before_anything_is_drawn(self) -> None:
        with interpreted():
            replay, other = (rl.ReplayBuffer(40, 2, (), num_envs=2, seed=5) for _ in range(2))
            play([replay, other], seed=0, length=6, calls="e")
            with pytest.raises(rl.SchemaError, match=r"out\."):
                replay.sample(4, out=replay.read(replay.ids()[:3]))
            assert_same_batch(replay.sample(4), other.sample(4))


class TestForce:
    def test_a_compiling_triton_is_told_what_to_set(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.language import standard  # noqa: PLC0415 (after the skip)
        from triton.runtime.jit import JITFunction  # noqa: PLC0415

        monkeypatch.setattr(standard, "zeros", object.__new__(JITFunction))
        with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1 before Python starts"), rl.kernels.force("triton"):
            pass

    def test_no_triton_is_told_how_to_install_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rl.kernels, "_has_triton", lambda: False)
        with pytest.raises(RuntimeError, match=r"relive\[triton\]"), rl.kernels.force("triton"):
            pass

    def test_other_names_are_refused(self) -> None:
        with pytest.raises(rl.SchemaError, match='"torch" or "triton"'), rl.kernels.force("native"):  # pyright: ignore[reportArgumentType]
            pass

    def test_a_buffer_keeps_its_kernels_outside(self) -> None:
        with interpreted():
            replay = SHAPES["floats"].buffer(seed=0)
            assert rl.kernels.backend() == "triton"
            play([replay], seed=0, length=4, calls="a")
        assert type(replay.storage).__name__ == "TritonBackend"
        assert rl.kernels.backend() != "triton"
        with interpreted(), Launches() as launches:
            replay.sample(3)
        assert launches.names == ["draw_rows_kernel", "read_kernel"]


class TestCheckpoints:
    def test_rows_move_between_kernels_both_ways(self, tmp_path: Path) -> None:
        native, triton = make_pair(SHAPES["nested"], sampler=rl.Prioritized())
        play([native, triton], seed=2, length=8)
        native.save(tmp_path / "native")
        triton.save(tmp_path / "triton")
        with interpreted():
            moved = load_replay(tmp_path / "native")
            assert type(moved.storage).__name__ == "TritonBackend"
            assert_same_batches(moved, triton)
            play([moved, triton], seed=9, length=3)
            assert_same_batches(moved, triton)
        back = load_replay(tmp_path / "triton")
        assert type(back.storage).__name__ == "NativeBackend"
        assert_same_batches(back, native)
        assert len(back.sample(5)) == 5
        with rl.kernels.force("torch"):
            assert_same_batches(load_replay(tmp_path / "triton"), native)

    @pytest.mark.parametrize("sampler", select(rl.Prioritized(), of=[None, rl.Prioritized()]))
    def test_draws_go_on_exactly(self, tmp_path: Path, sampler: Any) -> None:
        with interpreted():
            replay = rl.ReplayBuffer(40, 2, (), num_envs=2, sampler=sampler, seed=7)
            play([replay], seed=2, length=6, calls="e")
            replay.sample(5)
            replay.save(tmp_path)
            again = load_replay(tmp_path)
            for view in (rl.Transition(), rl.Sequence(2)):
                assert_same_batch(replay.sample(9, view), again.sample(9, view))
            assert same_bits(replay._random.uniform(3, replay.device), again._random.uniform(3, replay.device))


@pytest.mark.parametrize("number", select("T16", of=["T3", "T6", "T8", "T11", "T12", "T14", "T15", "T16", "T17"]))
def test_conformance(number: str) -> None:
    with interpreted():
        outcome = case(number).run(ours.adapter())
    assert outcome.status == PASSES, (outcome.expected, outcome.got, outcome.reason)
