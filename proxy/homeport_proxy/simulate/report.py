"""Results for people: a table with paired differences, and plots as PNG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from homeport_proxy.simulate.result import Row

_COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("hit", "hit_ratio", 3),
    ("TTFT p50 s", "ttft_p50_s", 2),
    ("p90 s", "ttft_p90_s", 2),
    ("p99 s", "ttft_p99_s", 2),
    ("ITL p99 s", "itl_p99_s", 3),
    ("moved", "moved_ratio", 3),
    ("x-region", "cross_region_ratio", 3),
)


def medians(rows: Sequence[Row], name: str) -> float | None:
    """Median of a figure over seeds; None when no seed measured it."""
    values = [value for row in rows if (value := getattr(row, name)) is not None]
    return median(values) if values else None


def paired(rows: Sequence[Row], base: Sequence[Row], name: str) -> float | None:
    """Median over seeds of this policy's figure over the base's with the same seed."""
    others = {row.seed: getattr(row, name) for row in base}
    ratios = [
        getattr(row, name) / others[row.seed] for row in rows if others.get(row.seed) and getattr(row, name) is not None
    ]
    return median(ratios) if ratios else None


def by_policy(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows grouped, in the order of first sight."""
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        grouped.setdefault(row.policy, []).append(row)
    return grouped


def print_table(rows: Sequence[Row], console: Console, title: str = "") -> None:
    """Medians over seeds, and how each policy's TTFT compares with the first one's, seed by seed."""
    grouped = by_policy(rows)
    base_name = next(iter(grouped), "")
    table = Table(title=title or None)
    table.add_column("policy")
    for label in ("seeds", "requests", *(column for column, _, _ in _COLUMNS)):
        table.add_column(label, justify="right")
    if len(grouped) > 1:
        table.add_column(f"p90, p99 / {base_name}", justify="right")
    for name, group in grouped.items():
        cells = [name, str(len(group)), str(round(sum(row.requests for row in group) / len(group)))]
        cells += [_cell(medians(group, field), digits) for _, field, digits in _COLUMNS]
        if len(grouped) > 1:
            ratios = (paired(group, grouped[base_name], field) for field in ("ttft_p90_s", "ttft_p99_s"))
            cells.append(", ".join(_cell(ratio, 2) for ratio in ratios))
        table.add_row(*cells)
    console.print(table)


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


class PlotError(ValueError):
    """A plot that cannot be drawn; the text says what is missing."""


def plot_ttft(ttft_s: Mapping[str, Sequence[float]], path: Path, title: str) -> None:
    """The share of requests over their TTFT (log scale), one line per policy, as PNG. Raises :class:`PlotError`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise PlotError("--plot needs matplotlib; install it with: pip install matplotlib") from error
    figure = Figure(figsize=(8, 5))
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, values in ttft_s.items():
        ordered = sorted(max(value, 1e-3) for value in values)
        if ordered:
            axes.plot(ordered, [(index + 1) / len(ordered) for index in range(len(ordered))], label=name)
    axes.set_xscale("log")
    axes.set_xlabel("TTFT, s")
    axes.set_ylabel("share of requests")
    axes.set_title(title)
    axes.grid(True, alpha=0.3)
    axes.legend()
    try:
        canvas.print_figure(str(path), format="png")
    except OSError as error:
        raise PlotError(f"{path}: {error.strerror or error}") from error
