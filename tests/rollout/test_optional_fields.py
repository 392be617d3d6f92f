"""`value` and `log_prob` of a rollout: a field that no step passed is absent, and never zeros."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive as rl
from tests.checkpoint.traffic import fingerprint

N, T = 3, 4


def step(t: int, *names: str) -> dict[str, Any]:
    """Return a recognisable step with the optional fields `names`: value = 10·t + 1, log_prob = −t − 1."""
    fields = {
        "obs": np.full((N, 2), t, np.float32),
        "action": np.full(N, t, np.float32),
        "reward": np.full(N, 1.0, np.float32),
        "terminated": np.zeros(N, bool),
        "truncated": np.zeros(N, bool),
    }
    optional = {"value": np.full(N, 10.0 * t + 1, np.float32), "log_prob": np.full(N, -t - 1.0, np.float32)}
    return fields | {name: optional[name] for name in names}


def make(*names: str, steps: int = T, **options: Any) -> rl.RolloutBuffer:
    """Return a rollout whose steps pass the optional fields `names`."""
    rollout = rl.RolloutBuffer(T, N, obs=2, action=(), seed=0, **options)
    for t in range(steps):
        rollout.add(**step(t, *names))
    return rollout


def readings(rollout: rl.RolloutBuffer) -> dict[str, Any]:
    """Return a minibatch, sequences, data and env_major, by name."""
    return {
        "minibatches": next(rollout.minibatches(2)),
        "sequences": next(rollout.sequences(2)),
        "data": rollout.data,
        "env_major": rollout.env_major(),
    }


BOTH = ("value", "log_prob")
WHICH = [(), ("value",), ("log_prob",), BOTH]


class TestAbsence:
    @pytest.mark.parametrize("names", WHICH)
    def test_what_no_step_gave_is_nowhere(self, backend: str, names: tuple[str, ...]) -> None:
        rollout = make(*names)
        for name in BOTH:
            assert (name in rollout) == (name in names)
            for where, batch in readings(rollout).items():
                assert (name in batch.keys()) == (name in names), where

    def test_the_error_says_what_to_pass(self) -> None:
        rollout = make("value")
        with pytest.raises(KeyError, match=r"log_prob: expected .* got none.*Pass log_prob= to every add.*attach"):
            rollout["log_prob"]
        with pytest.raises(rl.SchemaError, match=r"log_prob: expected .* got none.*Pass log_prob= to every add"):
            rollout.minibatches(2, fields=["obs", "log_prob"])
        with pytest.raises(rl.SchemaError, match=r"log_prob: expected .* got none.*Pass log_prob= to every add"):
            rollout.sequences(2, fields=["obs", "log_prob"])

    def test_fields_and_out_are_of_what_is_there(self, backend: str) -> None:
        rollout = make("log_prob")
        batch = next(rollout.minibatches(4))
        assert set(batch.keys()) == {"obs", "action", "reward", "terminated", "truncated", "log_prob", "index"}
        assert all(filled is batch for filled in rollout.minibatches(4, out=batch))
        only = next(rollout.minibatches(12, fields=["log_prob"], shuffle=False))
        assert only["log_prob"].tolist() == [-t - 1 for t in range(T) for _ in range(N)]
        with pytest.raises(rl.SchemaError, match="out: expected the fields"):
            rollout.minibatches(4, out=next(make(*BOTH).minibatches(4)))

    def test_in_says_what_can_be_read(self) -> None:
        rollout = rl.RolloutBuffer(T, N, obs={"a": 2}, action=())
        assert "obs" not in rollout
        rollout.add(**{**step(0), "obs": {"a": np.zeros((N, 2))}})
        assert "obs" in rollout
        assert ("obs", "a") in rollout
        assert "mask" in rollout
        assert ("obs", "b") not in rollout
        assert "a" not in rollout
        assert "advantage" not in rollout
        assert 0 not in rollout
        rollout.attach(advantage=np.zeros((1, N)))
        assert "advantage" in rollout

    def test_a_nested_field_is_there_as_a_whole(self, backend: str) -> None:
        each = {"fox": (), "hare": ()}
        rollout = rl.RolloutBuffer(1, None, obs=1, action=(), reward=each, value=each)
        rollout.add([0.0], 0.0, {"fox": 1.0, "hare": 1.0}, False, False, value={"fox": 1.0, "hare": 2.0})
        assert ("value", "hare") in rollout
        assert "log_prob" not in rollout
        assert ("log_prob", "fox") not in rollout
        assert "log_prob" not in rollout.data.keys()

    def test_lent_memory_has_every_field_and_all_of_it_counts_as_given(self) -> None:
        rollout = make()
        lent = rollout.lend()
        assert {"value", "log_prob"} <= set(lent.keys())
        assert {"value", "log_prob"} <= set(rollout.columns.keys())
        lent["log_prob"][:, 0] = 5
        rollout.take_back(2)
        assert "value" in rollout
        assert rollout["log_prob"].tolist() == [[5.0] * N, [0.0] * N]
        with pytest.raises(rl.SchemaError, match="^value: expected"):
            rollout.add(**step(2, "log_prob"))
        rollout.add(**step(2, *BOTH))

    def test_no_rows_taken_back_are_no_first_step(self) -> None:
        rollout = make(*BOTH)
        rollout.take_back(0)
        rollout.add(**step(0))
        assert "value" not in rollout

    def test_statistics_and_norms_are_told_of_given_fields_only(self, backend: str) -> None:
        norms: dict[Any, rl.RunningNorm] = {
            "value": rl.RunningNorm(()),
            "log_prob": rl.RunningNorm(()),
            "reward": rl.RunningNorm(()),
        }
        stats = rl.EpisodeStats(N, metrics=("value", "log_prob"))
        rollout = rl.RolloutBuffer(T, N, obs=2, action=(), norm=norms, stats=stats)
        rollout.add(**step(0, "log_prob"))
        rollout.add(**step(1, "log_prob") | {"terminated": np.ones(N, bool)})
        assert [norms[name].count for name in ("value", "log_prob", "reward")] == [0, 2 * N, 2 * N]
        assert stats.episodes()["value"].tolist() == [0.0] * N
        assert stats.episodes()["log_prob"].tolist() == [-3.0] * N

    def test_inspection_shows_no_field_that_nobody_gave(self) -> None:
        fields = [field["name"] for field in rl.inspect(make("value")).as_dict()["fields"]]
        assert "value" in fields
        assert "log_prob" not in fields


def by_add(rollout: rl.RolloutBuffer, fields: dict[str, Any]) -> None:
    rollout.add(**fields)


def by_add_step(rollout: rl.RolloutBuffer, fields: dict[str, Any]) -> None:
    given = dict(fields)
    taken = (given["obs"] + 1, *(given.pop(name) for name in ("reward", "terminated", "truncated")), {})
    rollout.add_step(given.pop("obs"), given.pop("action"), taken, **given)


def by_stage(rollout: rl.RolloutBuffer, fields: dict[str, Any]) -> None:
    rollout.stage(obs=fields["obs"])
    rollout.add(**{**fields, "obs": None})


def by_staging_what_is_optional(rollout: rl.RolloutBuffer, fields: dict[str, Any]) -> None:
    given = dict(fields)
    optional = {name: given.pop(name) for name in BOTH if name in given}
    rollout.stage(**optional, obs=given["obs"])
    rollout.add(**{**given, "obs": None})


WAYS: list[Callable[[rl.RolloutBuffer, dict[str, Any]], None]] = [
    by_add,
    by_add_step,
    by_stage,
    by_staging_what_is_optional,
]


class TestDifference:
    @pytest.mark.parametrize("extra", [None, {"hint": ()}], ids=["plain", "extra"])
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize(
        ("first", "later", "name"),
        [
            (BOTH, ("value",), "log_prob"),
            (BOTH, ("log_prob",), "value"),
            (BOTH, (), "value"),
            ((), BOTH, "value"),
            (("value",), BOTH, "log_prob"),
            (("log_prob",), ("value",), "value"),
        ],
    )
    def test_a_step_that_differs_from_the_first_is_refused_and_nothing_changes(
        self,
        backend: str,
        way: Callable[..., None],
        extra: dict[str, Any] | None,
        first: tuple[str, ...],
        later: tuple[str, ...],
        name: str,
    ) -> None:
        hint = {} if extra is None else {"hint": np.zeros(N)}
        rollout = rl.RolloutBuffer(T, N, obs=2, action=(), extra=extra, autoreset="DISABLED", seed=0)
        rollout.add(**step(0, *BOTH), **hint)
        rollout.clear()
        for t in range(2):
            rollout.add(**step(t, *first), **hint)
        if "value" in first:
            rollout.compute_advantage(np.full(N, 3.0), last_obs=np.full((N, 2), 9.0))
        before = rollout.env_major().clone()
        got = "none" if name in first else "one"
        with pytest.raises(rl.SchemaError, match=rf"^{name}: expected .*first step.* got {got}\. "):
            way(rollout, step(2, *later) | hint)
        assert rollout.num_stored == 2
        if not rollout._storage.staged:
            assert (rollout.env_major() == before).all()
        staged = dict.fromkeys(rollout._storage.staged)
        rollout.add(**{**step(2, *first), **hint, **staged})
        rollout.check()
        assert rollout["obs"][:, 0, 0].tolist() == [0, 1, 2]

    def test_a_refused_first_step_decides_nothing(self, backend: str) -> None:
        rollout = make(steps=0)
        with pytest.raises(rl.SchemaError, match="^action: expected"):
            rollout.add(**{**step(0, *BOTH), "action": np.zeros(N + 1)})
        rollout.add(**step(0))
        rollout.add(**step(1))
        assert "value" not in rollout

    def test_a_staged_optional_field_of_the_first_step_is_given(self) -> None:
        rollout = make(steps=0)
        rollout.stage(log_prob=np.full(N, -1.0))
        rollout.add(**step(0))
        assert "log_prob" in rollout
        with pytest.raises(rl.SchemaError, match="^log_prob: expected"):
            rollout.add(**step(1))

    def test_every_rollout_decides_anew(self, backend: str) -> None:
        rollout = make("value")
        rollout.clear()
        rollout.add(**step(0, "log_prob"))
        assert "value" not in rollout
        assert rollout["log_prob"].tolist() == [[-1.0] * N]


class TestAttaching:
    def test_an_absent_field_may_be_given_afterwards(self, backend: str) -> None:
        rollout, given = make(), make("value")
        rollout.attach(value=np.arange(T, dtype=np.float64)[:, None].repeat(N, 1) * 10 + 1)
        for each in (rollout, given):
            each.compute_advantage(np.full(N, 7.0), last_obs=np.full((N, 2), 8.0), gamma=0.9, lam=0.8)
        assert rollout["value"].dtype == torch.float32
        for where, batch in readings(given).items():
            found = readings(rollout)[where]
            assert set(found.keys()) == set(batch.keys()), where
            if where in ("data", "env_major"):
                assert (found == batch).all(), where
        rollout.check()

    def test_it_has_the_declared_shape(self) -> None:
        rollout = rl.RolloutBuffer(T, N, obs=2, action=(), reward=(2,), value=(2,))
        rollout.add(**{**step(0), "reward": np.ones((N, 2))})
        with pytest.raises(rl.SchemaError, match=r"^value: expected shape \(1, 3, 2\)"):
            rollout.attach(good=np.zeros((1, N)), value=np.zeros((1, N)))
        assert "value" not in rollout
        assert "good" not in rollout
        rollout.attach(value=np.full((1, N, 2), 2.0))
        rollout.attach(value=np.full((1, N, 2), 3.0))
        assert rollout["value"].eq(3.0).all()

    def test_a_dict_of_agents_too(self) -> None:
        each = {"fox": (), "hare": ()}
        rollout = rl.RolloutBuffer(1, None, obs=1, action=(), reward=each, value=each)
        rollout.add([0.0], 0.0, {"fox": 1.0, "hare": 2.0}, True, False)
        with pytest.raises(rl.SchemaError, match=r"^value: expected the keys"):
            rollout.attach(value={"fox": [0.5]})
        rollout.attach(value={"fox": [0.5], "hare": [0.25]})
        rollout.compute_advantage({"fox": 0.0, "hare": 0.0})
        assert rollout["advantage", "hare"].tolist() == [1.75]

    def test_a_field_that_the_steps_gave_is_taken(self) -> None:
        with pytest.raises(rl.SchemaError, match="^attach: expected an unused name, got .value."):
            make("value").attach(value=np.zeros((T, N)))

    def test_the_next_step_removes_an_attached_optional_field(self) -> None:
        rollout = make(steps=2)
        rollout.attach(value=np.ones((2, N)))
        assert "value" in rollout
        rollout.add(**step(2))
        assert "value" not in rollout
        rollout.check()
        with pytest.raises(rl.NotReadyError, match=r"compute_advantage: expected a value .*Pass value= to every add"):
            rollout.compute_advantage(np.zeros(N))

    def test_its_memory_is_counted_once(self) -> None:
        rollout = make()
        before = rollout.nbytes
        rollout.attach(value=np.ones((T, N)))
        assert rollout.nbytes == before

    def test_data_that_moved_to_shared_memory_is_the_same_again(self, backend: str) -> None:
        rollout = make()
        rollout.attach(value=np.ones((T, N)))
        rollout.data.share_memory_()
        rollout.clear()
        rollout.add(**step(0, *BOTH))
        assert rollout["value"].tolist() == [[1.0] * N]


class TestCheckpoints:
    @pytest.mark.parametrize("names", WHICH)
    def test_a_loaded_rollout_has_the_same_optional_fields(self, names: tuple[str, ...], tmp_path: Path) -> None:
        rollout = rl.RolloutBuffer(T, N, obs=2, action=(), seed=0)
        for t in range(2):
            zeros = dict.fromkeys(names, np.zeros(N))
            rollout.add(**{**step(t), **zeros})
        rollout.save(tmp_path)
        loaded: Any = rl.load(tmp_path)
        assert fingerprint(loaded) == fingerprint(rollout)
        for name in BOTH:
            assert (name in loaded) == (name in names)
        loaded.add(**step(2, *names))
        loaded.check()

    def test_an_attached_value_is_still_attached(self, tmp_path: Path) -> None:
        rollout = make(steps=2)
        rollout.attach(value=np.ones((2, N)))
        rollout.compute_advantage(np.zeros(N))
        rollout.save(tmp_path)
        loaded: Any = rl.load(tmp_path)
        loaded.check()
        assert (loaded.env_major() == rollout.env_major()).all()
        assert loaded["value"].data_ptr() == loaded.lend()["value"].data_ptr()
        loaded.add(**step(2))
        assert "value" not in loaded

    @pytest.mark.parametrize(
        ("zeros", "valued", "expected"),
        [((), 2, {"value", "log_prob"}), (("log_prob",), 2, {"value"}), (BOTH, 2, {"value"}), ((), 1, {"log_prob"})],
    )
    def test_an_older_checkpoint_counts_values_and_takes_zeros_for_no_log_prob(
        self, zeros: tuple[str, ...], valued: int, expected: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        state = rl.RolloutBuffer.state

        def without_record(rollout: rl.RolloutBuffer) -> Any:
            found = state(rollout)
            del found.values["rows"]["given"]
            found.values["rows"]["valued"] = valued
            return found

        monkeypatch.setattr(rl.RolloutBuffer, "state", without_record)
        rollout = rl.RolloutBuffer(T, N, obs=2, action=(), seed=0)
        for t in range(2):
            rollout.add(**{**step(t, *BOTH), **dict.fromkeys(zeros, np.zeros(N))})
        rollout.save(tmp_path)
        loaded: Any = rl.load(tmp_path)
        loaded.check()
        assert {name for name in BOTH if name in loaded} == expected

    def test_the_golden_rollout_never_had_a_log_prob(self, tmp_path: Path) -> None:
        golden = Path(__file__).parents[1] / "checkpoint" / "golden" / "format-1" / "rollout"
        shutil.copytree(golden, tmp_path / "rollout")
        loaded: Any = rl.load(tmp_path / "rollout")
        assert "value" in loaded
        assert "log_prob" not in loaded
