"""Plots as SVG text. Matplotlib draws; nothing is fetched by the finished page."""

from __future__ import annotations

import io
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH_IN, HEIGHT_IN = 6.2, 3.0
COLOURS = ("#2b6cb0", "#dd6b20", "#2f855a", "#805ad5", "#c53030", "#718096")
ABOVE: dict[str, Any] = {
    "frameon": False,
    "fontsize": 8,
    "loc": "lower left",
    "bbox_to_anchor": (0, 1),
    "ncols": 4,
}
"""A legend above the axes, where no bar can hide it."""


def figure(height_in: float = HEIGHT_IN) -> tuple[Figure, Axes]:
    """An empty plot."""
    made = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    axes = made.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return made, axes


def as_svg(figure: Figure) -> str:
    """The `<svg>` element of a plot."""
    buffer = io.StringIO()
    # No date: the same run gives the same bytes.
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
