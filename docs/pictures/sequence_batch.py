"""Draws the picture of docs/guides/r2d2.md: one batch of sequences with burn-in, row by row.

Run it as `python docs/pictures/sequence_batch.py`; it writes docs/images/r2d2_batch.png, which is kept.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from tensordict import TensorDict

import relive as rl

IMAGE = Path(__file__).parent.parent / "images" / "r2d2_batch.png"
LENGTH, BURN_IN, EPISODE = 4, 3, 7
COLORS = {"burn-in": "#e0a458", "trained": "#2f6f9f", "padding": "#e6e8eb"}


def batch() -> TensorDict:
    """Rows 0, 1, 2, 4 and 6 of an episode of seven steps; obs is the time in it."""
    replay = rl.ReplayBuffer(100, obs=1, action=(), extra={"hidden": rl.Carry(1)}, seed=0)
    for t in range(EPISODE):
        replay.add([float(t)], 0.0, 0.0, t == EPISODE - 1, False, [t + 1.0], hidden=[float(t)])
    return replay.read([0, 1, 2, 4, 6], rl.Sequence(LENGTH, BURN_IN))


def kinds(batch: TensorDict) -> list[list[str]]:
    """The kind of every position [B, L]."""
    marks = zip(batch["mask"].tolist(), batch["train"].tolist(), strict=True)
    return [
        ["trained" if t else "burn-in" if m else "padding" for m, t in zip(mask, train, strict=True)]
        for mask, train in marks
    ]


def main() -> None:
    drawn = batch()
    count = len(drawn)
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.add_subplot(xlim=(-1.9, LENGTH + BURN_IN), ylim=(count + 0.1, -0.8))
    axes.set_axis_off()
    axes.set_title(f"Sequence({LENGTH}, burn_in={BURN_IN}): rows of one episode of {EPISODE} steps", loc="left")
    for j in range(LENGTH + BURN_IN):
        axes.text(j + 0.48, -0.25, f"[:, {j}]", ha="center", color="#7a828e")
    for i, row in enumerate(kinds(drawn)):
        drawn_step = f"index: step {int(drawn['index'][i])}\nhidden of {int(drawn['hidden'][i, 0])}"
        axes.text(-0.15, i + 0.45, drawn_step, ha="right", va="center", fontsize=8.5, color="#7a828e")
        for j, kind in enumerate(row):
            axes.add_patch(Rectangle((j, i), 0.96, 0.88, color=COLORS[kind]))
            text = "0" if kind == "padding" else f"t = {int(drawn['obs'][i, j, 0])}"
            axes.text(
                j + 0.48, i + 0.44, text, ha="center", va="center", color="#9aa1ab" if kind == "padding" else "white"
            )
    handles = [Patch(color=color, label=kind) for kind, color in COLORS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(IMAGE, dpi=120)


if __name__ == "__main__":
    main()
