"""The picture of a run: training loss by step, validation metrics by epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def draw_curves(steps: list[dict[str, Any]], validations: list[dict[str, Any]], path: Path) -> None:
    """Draws the picture of a run as a PNG.

    Args:
        steps: records of train_log.jsonl.
        validations: records of validation.jsonl.
        path: file to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    if steps:
        x = np.array([record["step"] for record in steps])
        y = np.array([record["loss"] for record in steps])
        window = max(1, len(y) // 50)
        left.plot(x, y, color="#9ecae1", linewidth=0.8, label="each step")
        if window > 1:
            smooth = np.convolve(y, np.ones(window) / window, mode="valid")
            left.plot(x[window - 1 :], smooth, color="#08519c", linewidth=1.6, label=f"mean of {window} steps")
        left.legend(frameon=False)
    left.set(xlabel="step", ylabel="loss per target", title="Training loss")
    for name, colour in (("ndcg@10", "#08519c"), ("hr@10", "#a63603")):
        values = [(record["epoch"], record["filtered"][name]) for record in validations]
        if values:
            x, y = np.array(values).T
            right.plot(x, y, color=colour, linewidth=1.6, marker="o", markersize=3, label=name.upper())
    if validations:
        best = max(validations, key=lambda record: record["filtered"]["ndcg@10"])
        right.axvline(
            best["epoch"], color="#999999", linewidth=0.8, linestyle="--", label=f"best, epoch {best['epoch']}"
        )
        right.legend(frameon=False)
        right.set_ylim(bottom=0)
    right.set(xlabel="epoch", title="Validation, seen items filtered")
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path)
