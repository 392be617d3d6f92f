"""Reading an HDF5 file of robomimic or D4RL into a buffer."""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch

from relive.datasets.blocks import split
from relive.datasets.columns import Columns, Encoders, chosen_columns, chosen_encoders
from relive.datasets.filling import FinalObs, fill
from relive.datasets.hdf5.d4rl import FlatSteps, is_d4rl
from relive.datasets.hdf5.file import opened
from relive.datasets.hdf5.robomimic import Demonstrations, is_robomimic
from relive.errors import SchemaError, explain
from relive.fields.checks import positive
from relive.replay.samplers import Sampler
from relive.storage import Memory


def from_hdf5(
    path: str | PathLike[str],
    buffer: Any = None,
    *,
    columns: Columns | None = None,
    encode: Encoders | None = None,
    time_limit: int | None = None,
    final_obs: FinalObs = None,
    sampler: Sampler | None = None,
    device: torch.device | str | Memory = "cpu",
    seed: int | None = None,
) -> Any:
    """Read an HDF5 file of robomimic or D4RL, block by block, into a buffer; returns the buffer.

    robomimic (`data/demo_0/obs/…`, `actions`, `rewards`, `dones`): `dones` are terminated, and a demonstration that
    does not end with one is truncated at its last step. D4RL (`observations`, `actions`, `rewards`, `terminals`,
    `timeouts`): `terminals` are terminated, `timeouts` are truncated. All other columns are extra fields of their name.
    A file without rewards gives 0.

    The next observation is the one that the file has (`next_obs`, `next_observations`), and otherwise that of the next
    row in the same episode. Then an episode's final observation is unknown: a terminated step stores its own
    observation again, which no target uses, and `final_obs` says what becomes of a truncated one.

    Args:
        path: the file.
        buffer: the buffer to fill: a ReplayBuffer, a RolloutBuffer with num_envs=None or a DistillationBuffer. None
            makes a ReplayBuffer with space for all steps, in which float64 becomes float32.
        columns: the fields of columns that are not the usual ones: `{"states": None}` leaves a column out,
            `{"obs/robot0_eef_pos": "obs.position"}` renames it. The name of a group means all of its columns.
        encode: for each column of texts, a function that turns a text into numbers; each text is encoded once.
        time_limit: the most steps of an episode, for a D4RL file without `timeouts`.
        final_obs: "drop" leaves out a truncated last step whose next observation is unknown, "repeat" stores its own
            observation as the next one, from which a learner then bootstraps. None is "drop" with a `DataWarning`.
        sampler: the sampler of the new buffer.
        device: the device or memory of the new buffer.
        seed: the seed of the new buffer.
    """
    chosen, encoders = chosen_columns(columns), chosen_encoders(encode)
    with opened(path) as (file_path, file):
        if is_d4rl(file):
            flat = FlatSteps(file_path, file)
            plan = flat.plan(chosen, encoders, buffer)
            steps = flat.steps(plan, None if time_limit is None else positive("time_limit", time_limit))
        elif is_robomimic(file):
            demonstrations = Demonstrations(file_path, file)
            plan = demonstrations.plan(chosen, encoders, buffer)
            steps = demonstrations.steps(plan)
        else:
            expected, remedy = "the group 'data' (robomimic) or the array 'observations' (D4RL)", "Pass such a file."
            raise SchemaError(explain(file_path.name, expected, ", ".join(file) or "an empty file", remedy))
        if buffer is None:
            buffer = plan.made(steps.rows + steps.ends, sampler, device, seed)
        return fill("from_hdf5", buffer, split(file_path.name, steps.stretches), steps.rows, final_obs)
