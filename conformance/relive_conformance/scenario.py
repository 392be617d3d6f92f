"""Scenarios: experience whose numbers say where they come from, and the batches that a buffer must give for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from relive_conformance.adapters.off_policy import Array, ReplayBatch, ReplayShape, Transitions
from relive_conformance.outcome import Differs, expect_equal, figures

Script = Sequence[tuple[int, str]]
"""The episodes of an environment in order: (length, "terminated", "truncated" or "open")."""
Row = tuple[int, int]
"""(environment, time)."""

LEARNED = ("action", "reward", "terminated")
"""The fields that a learner reads besides observations."""
_OBS_OFFSET = 1000
"""The observations of environment n are numbered from n · 1000."""


@dataclass(frozen=True)
class Scenario:
    """The steps of several environments: `envs[n]` are those of environment n in time order."""

    envs: list[Transitions]

    def __len__(self) -> int:
        return min(len(env) for env in self.envs)

    def shape(self, capacity: int, seed: int | None = 0) -> ReplayShape:
        """Return the shape of a buffer for this scenario, with `capacity` rows per environment."""
        obs = self.envs[0].obs
        shape = obs.shape[1:]
        return ReplayShape(capacity * len(self.envs), len(self.envs), shape, 1, obs.dtype.type, seed)

    def steps(self, start: int = 0, stop: int | None = None) -> Iterator[Transitions]:
        """Yield steps of all environments, in newly allocated arrays."""
        for t in range(len(self))[start:stop]:
            yield self.at([(env, t) for env in range(len(self.envs))])

    def at(self, rows: Sequence[Row]) -> Transitions:
        """Return a copy of these rows."""
        names = [field.name for field in fields(Transitions)]
        return Transitions(*(np.stack([getattr(self.envs[env], name)[t] for env, t in rows]) for name in names))

    def rows_of(self, obs: Array) -> list[Row]:
        """Return the rows of these observations; an unknown observation raises `Differs`."""
        rows = [self._known.get(_key(o)) for o in np.asarray(obs)]
        if None in rows:
            raise Differs("an observation that was added", figures(np.asarray(obs)[rows.index(None)]))
        return [row for row in rows if row is not None]

    @cached_property
    def _known(self) -> dict[bytes, Row]:
        return {_key(o): (n, t) for n, env in enumerate(self.envs) for t, o in enumerate(env.obs)}

    def last(self, row: Row, num_steps: int) -> int:
        """Return the time of the last step of this row's episode, or of the newest of `num_steps` steps."""
        env, t = row
        while t < num_steps - 1 and not self.envs[env].ended[t]:
            t += 1
        return t


def play(*scripts: Script) -> Scenario:
    """Play the scripts: obs (x, −x) with a unique number x, action 2x, reward 3x."""
    return Scenario([_episodes(script, _OBS_OFFSET * n + 1) for n, script in enumerate(scripts)])


def _episodes(script: Script, number: int) -> Transitions:
    x, following, terminated, truncated = [], [], [], []
    for length, end in script:
        x.extend(range(number, number + length))
        following.extend(range(number + 1, number + length + 1))
        terminated.extend([False] * (length - 1) + [end == "terminated"])
        truncated.extend([False] * (length - 1) + [end == "truncated"])
        number += length + 1 if end != "open" else length
    return _transitions(np.array(x), np.array(following), np.array(terminated), np.array(truncated))


def _transitions(x: Array, following: Array, terminated: Array, truncated: Array) -> Transitions:
    obs, next_obs = (np.stack([v, -v], 1).astype(np.float32) for v in (x, following))
    action, reward = (2 * x[:, None]).astype(np.float32), (3 * x).astype(np.float32)
    return Transitions(obs, action, reward, terminated, truncated, next_obs)


def scripts(random: np.random.Generator, num_envs: int, num_steps: int) -> list[Script]:
    """Return random scripts of at least `num_steps` steps per environment."""
    scripts: list[Script] = []
    for _ in range(num_envs):
        script: list[tuple[int, str]] = []
        while sum(length for length, _ in script) < num_steps:
            script.append((int(random.integers(1, 6)), str(random.choice(["terminated", "truncated"]))))
        scripts.append(script)
    return scripts


def same_transitions(batch: ReplayBatch, scenario: Scenario, names: Sequence[str] = LEARNED) -> list[Row]:
    """Raise `Differs` unless every drawn row was added, with its next observation and fields; return the rows."""
    rows = scenario.rows_of(batch.obs)
    expected = scenario.at(rows)
    for i, row in enumerate(rows):
        where = f"of step {row[1]}" + (f" of environment {row[0]}" if len(scenario.envs) > 1 else "")
        for name in names:
            expect_equal(f"{name} {where}", getattr(batch, name)[i], getattr(expected, name)[i])
        end = "terminated" if expected.terminated[i] else "truncated" if expected.truncated[i] else "inside an episode"
        expect_equal(f"next_obs {where} ({end})", batch.next_obs[i], expected.next_obs[i])
    return rows


def _key(obs: Array) -> bytes:
    return np.asarray(obs, np.float64).tobytes()
