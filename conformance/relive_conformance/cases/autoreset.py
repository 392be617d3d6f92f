"""T3: one scripted environment under every autoreset mode."""

from __future__ import annotations

from gymnasium.vector import AutoresetMode

from relive_conformance.adapters.protocol import Adapter
from relive_conformance.case import Case
from relive_conformance.outcome import expect
from relive_conformance.probe import Probe, require
from relive_conformance.scripted import Script, act, step_and_reset, transitions, vector

SCRIPTS: list[Script] = [((3, "truncated"), (2, "terminated")), ((5, "both"),)]
STEPS = 12


def check_every_mode(adapter: Adapter) -> None:
    make = require(adapter.from_env, "way to be given a vector environment's step")
    for mode in AutoresetMode:
        envs = vector(SCRIPTS, mode)
        replay = make(envs, 200)
        obs, _ = envs.reset()
        for _ in range(STEPS):
            action = act(obs)
            step, next_obs = step_and_reset(envs, action)
            replay.add_step(obs, action, step)
            obs = next_obs
        envs.close()
        counts = [_count(script, mode) for script in SCRIPTS]
        expect(replay.stored == sum(counts), f"{sum(counts)} transitions under {mode.name}", replay.stored)
        true = {
            t.obs: (t.reward, t.terminated, tuple(map(float, t.next_obs)))
            for env, count in enumerate(counts)
            for t in transitions(env, SCRIPTS[env], count)
        }
        batch = Probe(replay).draw(40 * replay.stored)
        rows = zip(batch.obs.tolist(), batch.reward, batch.terminated, batch.next_obs.tolist(), strict=True)
        by_obs = {tuple(o): (float(r), bool(d), tuple(after)) for o, r, d, after in rows}
        for obs_, row in by_obs.items():
            expect(row == true.get(obs_), f"{true.get(obs_)} after {obs_} under {mode.name}", row)
        expect(len(by_obs) == len(true), f"{len(true)} different transitions under {mode.name}", len(by_obs))


def _count(script: Script, mode: AutoresetMode) -> int:
    """Return the number of transitions: under NEXT_STEP each end before the last step is followed by a reset step."""
    if mode is not AutoresetMode.NEXT_STEP:
        return STEPS
    is_transition: list[bool] = []
    for t in transitions(0, script, STEPS):
        is_transition += [True, False] if t.terminated or t.truncated else [True]
    return sum(is_transition[:STEPS])


CASES = (
    Case(
        "T3",
        "one meaning for every autoreset",
        "One scripted environment under NEXT_STEP, SAME_STEP and DISABLED autoreset.",
        "identical transitions, no reset row, the true final observation",
        check_every_mode,
    ),
)
