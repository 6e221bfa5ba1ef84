# SPDX-License-Identifier: Apache-2.0
"""Plots of an evaluation, and its rows as CSV."""

import csv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_dpa.checkpoint import replace_file
from vllm_dpa.kernels.planes import NUM_TIERS
from vllm_dpa.profiling.evaluate import Report, Row
from vllm_dpa.profiling.report import report_libraries

Label = tuple[str, int]


def write_csv(report: Report, path: Path) -> None:
    """One line per row of the report, with a header."""

    def write(partial_path: Path) -> None:
        with partial_path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(Row.model_fields))
            writer.writeheader()
            writer.writerows(row.model_dump() for row in report.rows)

    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, write)


def write_plots(report: Report, folder: Path) -> list[Path]:
    """frontier.png, reduction.png, layers.png and gates.png in ``folder``.

    Raises:
        DpaError: matplotlib is not installed.
    """
    _, pyplot = report_libraries()
    folder.mkdir(parents=True, exist_ok=True)
    draw: dict[str, Callable[[Any, Report], None]] = {
        "frontier": _frontier,
        "reduction": _reduction,
        "layers": _layers,
        "gates": _gates,
    }
    paths = []
    for name, fill in draw.items():
        figure, axes = pyplot.subplots(figsize=(9, 4.2), layout="constrained")
        fill(axes, report)
        axes.grid(alpha=0.3)
        path = folder / f"{name}.png"
        replace_file(path, partial(figure.savefig, format="png", dpi=120))
        pyplot.close(figure)
        paths.append(path)
    return paths


def _curves(report: Report) -> dict[Label, list[int]]:
    """(mode, dispatch size) -> indices of its rows, by budget."""
    curves: dict[Label, list[int]] = {}
    for i, row in enumerate(report.rows):
        curves.setdefault((row.mode, row.dispatch_tokens), []).append(i)
    return {
        label: sorted(rows, key=lambda i: report.rows[i].k_bar) for label, rows in curves.items()
    }


def _name(label: Label) -> str:
    return f"{label[0]}, dispatches of {label[1]}"


def _frontier(axes: Any, report: Report) -> None:
    for label, indices in _curves(report).items():
        rows = [report.rows[i] for i in indices]
        axes.errorbar(
            [row.bytes_read_per_token / 1024 for row in rows],
            [row.kl for row in rows],
            yerr=[row.kl_ci95 or 0 for row in rows],
            marker="o",
            markersize=4,
            capsize=2,
            label=_name(label),
        )
    axes.set(
        xlabel="KiB read per token",
        ylabel="KL from full precision, nats",
        xscale="log",
        yscale="log",
    )
    _legend(axes)


def _reduction(axes: Any, report: Report) -> None:
    """KL against that of uniform k at the same budget and dispatch size."""
    uniform = {(r.dispatch_tokens, r.k_bar): r.kl for r in report.rows if r.mode == "uniform"}
    for label, indices in _curves(report).items():
        rows = [report.rows[i] for i in indices]
        points = [
            (row.k_bar, 100 * (row.kl / uniform[row.dispatch_tokens, row.k_bar] - 1))
            for row in rows
            if uniform.get((row.dispatch_tokens, row.k_bar))
        ]
        if label[0] != "uniform" and points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=_name(label))
    axes.set(xlabel="k-bar", ylabel="KL against uniform, %")
    _legend(axes)


def _mean_k(histogram: Tensor) -> Tensor:
    """Mean k of every row of a histogram [n, 9]."""
    k = torch.arange(NUM_TIERS, dtype=torch.float64)
    return (histogram.double() @ k) / histogram.sum(1).clamp_min(1)


def _by_row(axes: Any, report: Report, histogram: str) -> None:
    """Mean k of the rows that are not uniform; of several dispatch sizes the smallest is shown."""
    shown = min(row.dispatch_tokens for row in report.rows)
    for row, allocation in zip(report.rows, report.allocations, strict=True):
        if row.mode == "uniform" or row.dispatch_tokens != shown:
            continue
        mean = _mean_k(getattr(allocation, histogram)).tolist()
        label = f"{row.mode}, k-bar {row.k_bar:g}"
        axes.plot(range(len(mean)), mean, marker="o", markersize=4, label=label)
    axes.set(ylabel=f"mean k in dispatches of {shown}")
    _legend(axes)


def _legend(axes: Any) -> None:
    """Beside the axes, so that many curves do not cover them."""
    if axes.lines:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="x-small")


def _layers(axes: Any, report: Report) -> None:
    _by_row(axes, report, "by_layer")
    axes.set(xlabel="MoE layer")


def _gates(axes: Any, report: Report) -> None:
    _by_row(axes, report, "by_rank")
    axes.set(xlabel="rank of the expert's gate, 0 is the largest")
