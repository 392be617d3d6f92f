"""T21, T22, T27, T28: inputs, and what a call may change."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np

from relive_conformance.adapters.off_policy import Array, ReplayShape, Transitions
from relive_conformance.adapters.protocol import Adapter
from relive_conformance.case import Case
from relive_conformance.outcome import Differs, expect, figures
from relive_conformance.probe import Probe, require
from relive_conformance.scenario import Scenario, play, same_transitions


def check_copies(adapter: Adapter) -> None:
    scenario = play([(5, "open")])
    probe = Probe(require(adapter.replay, "replay buffer")(scenario.shape(8)))
    steps = list(scenario.steps())
    for step in steps:
        probe.add(step)
    for step in steps:
        for field in fields(Transitions):
            getattr(step, field.name)[...] = 0
    _unchanged(probe, scenario, "the arrays that were added")
    for leaf in probe.sample(5):
        # A read-only array cannot be changed.
        if leaf is not None and leaf.flags.writeable:
            leaf[...] = 0
    _unchanged(probe, scenario, "a batch that was drawn")


def _unchanged(probe: Probe, scenario: Scenario, what: str) -> None:
    try:
        same_transitions(probe.draw(60), scenario)
    except Differs as difference:
        raise Differs(f"stored rows that stay as they are when the caller changes {what}", difference.got) from None


IMAGES = ReplayShape(capacity=8, num_envs=1, obs=(2, 2, 1), action_dim=1, dtype=np.uint8)


def _image(x: Any, reward: type = np.float32) -> Transitions:
    obs, flag = np.full((1, 2, 2, 1), x), np.zeros(1, bool)
    return Transitions(
        obs, np.zeros((1, 1), np.float32), np.full(1, 0.5, reward), flag, flag.copy(), obs + obs.dtype.type(1)
    )


def check_dtypes(adapter: Adapter) -> None:
    probe = Probe(require(adapter.replay, "replay buffer")(IMAGES))
    for x in (200, 201, 202):
        probe.add(_image(np.uint8(x), np.float64))
    batch = probe.sample(3)
    for name in ("obs", "next_obs"):
        array: Array = getattr(batch, name)
        expect(array.dtype == np.uint8, f"{name} of uint8", array.dtype)
    seen = set(batch.next_obs.reshape(-1).tolist())
    expect(seen <= {201, 202, 203}, "next_obs from 201 to 203", sorted(seen))
    expect(set(batch.reward.tolist()) == {0.5}, "float64 rewards of 0.5", figures(batch.reward))
    try:
        probe.add(_image(np.float32(0.75)))
    except Exception:
        return
    stored = sorted(set(probe.draw(64).obs.reshape(-1).tolist()) - {200, 201, 202})
    raise Differs("0.75 into a field of uint8 to be refused", f"accepted, and stored as {stored}")


EIGHT = play(*[[(6, "open")]] * 8)
WRONG_SHAPES = {
    "obs of one environment, (1, 2), for eight": lambda step: replace(step, obs=step.obs[:1]),
    "next_obs (2,) for (8, 2)": lambda step: replace(step, next_obs=step.next_obs[0]),
    "a number for eight rewards": lambda step: replace(step, reward=np.float32(7.0)),
    "one flag for eight": lambda step: replace(step, terminated=np.ones(1, bool)),
}


def check_shapes(adapter: Adapter) -> None:
    make = require(adapter.replay, "replay buffer")
    for what, misshape in WRONG_SHAPES.items():
        probe = Probe(make(EIGHT.shape(4))).add_all(EIGHT.steps(0, 1))
        step = next(EIGHT.steps(1, 2))
        try:
            probe.add_raw(misshape(step))
        except Exception:
            continue
        raise Differs(f"{what} to be refused", f"accepted: {probe.stored} rows stored")


def check_unchanged_after_refusals(adapter: Adapter) -> None:
    make = require(adapter.replay, "replay buffer")
    scenario, refused = play([(12, "open")]), 0
    for field in ("obs", "action", "reward", "next_obs"):
        probe = Probe(make(scenario.shape(8))).add_all(scenario.steps(0, 10))
        before = probe.stored
        step = next(scenario.steps(10, 11))
        bad_step = replace(step, **{field: np.zeros((1, 7), np.float32)})
        try:
            probe.add_raw(bad_step)
        except BaseException as error:
            refusal, refused = type(error).__name__, refused + 1
        else:
            continue
        where = f"after an add with {field} of shape (1, 7) raised {refusal}"
        expect(probe.stored == before, f"{before} rows {where}", probe.stored)
        try:
            same_transitions(probe.draw(240), scenario)
            drawn_rows = {t for _, t in same_transitions(probe.add_all(scenario.steps(10, 11)).draw(240), scenario)}
        except Differs as difference:
            raise Differs(f"{difference.expected} {where}", difference.got) from None
        except BaseException as error:
            raise Differs(f"sampling and adding to go on {where}", f"{type(error).__name__}: {error}") from None
        expect(
            drawn_rows == set(range(3, 11)),
            f"rows 3 to 10 {where} and a good one followed",
            f"rows {sorted(drawn_rows)}",
        )
    expect(refused, "an add with a field of shape (1, 7) for (1, 2) or (1,) to be refused", "every one accepted")


CASES = (
    Case(
        "T21",
        "inputs and batches copied",
        "Arrays that are changed after they were added, and batches that the caller changes.",
        "the buffer is unchanged",
        check_copies,
    ),
    Case(
        "T22",
        "dtypes kept or refused",
        "uint8 observations, float64 rewards, and a float into an integer field.",
        "uint8 comes out as uint8, rewards are accepted, the float is refused",
        check_dtypes,
        misuse=True,
    ),
    Case(
        "T27",
        "no silent broadcast",
        "Shapes that could be broadcast: one environment's row or a number where eight are expected.",
        "refused",
        check_shapes,
        misuse=True,
    ),
    Case(
        "T28",
        "failed add undone",
        "An add that raises, because one field has the wrong shape.",
        "size, contents and the position of the next row are unchanged",
        check_unchanged_after_refusals,
        misuse=True,
    ),
)
