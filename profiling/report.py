# SPDX-License-Identifier: Apache-2.0
"""A report on an encoded checkpoint: one HTML file with its plots, to be read in a browser.

Needs matplotlib and jinja2 (``pip install vllm-dpa[report]``).
"""

import base64
import io
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from vllm_dpa.checkpoint import QUALITY, CheckpointReader, replace_file
from vllm_dpa.errors import DpaError
from vllm_dpa.kernels.planes import MIN_CHUNKS, NUM_TIERS
from vllm_dpa.profiling.inspection import inspect

TIERS = range(MIN_CHUNKS, NUM_TIERS)
WORST = 20
# The tier whose spread over experts is shown: in the middle of what budgets use.
SHOWN = 4

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ facts.source.name }}, encoded</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { border: 1px solid #ccc; padding: .2rem .6rem; text-align: right; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; }
</style></head><body>
<h1>{{ facts.source.name }}</h1>
<p>{{ "{:,}".format(facts.weights) }} expert weights in {{ facts.layers|length }} MoE layers;
{{ facts.scale_layout }} scales, groups of {{ facts.group_size }}; encoder {{ facts.encoder.name }}{%
if facts.encoder.calibration %}, calibrated on {{ "{:,}".format(facts.encoder.calibration.tokens) }}
tokens{% endif %}.</p>
<h2>Tiers</h2>
<table><tr><th>k</th><th>MiB</th><th>bits per weight</th><th>SQNR dB</th><th>SQNR dB with gain</th>
{% if outputs %}<th>output error, median</th><th>output error, worst</th>{% endif %}</tr>
{% for t in facts.tiers %}<tr><td>{{ t.k }}</td><td>{{ "%.1f"|format(t.bytes / 1048576) }}</td>
<td>{{ "%.3f"|format(t.bits_per_weight) }}</td><td>{{ "%.2f"|format(t.sqnr_db) }}</td>
<td>{{ "%.2f"|format(t.sqnr_db_with_gain) }}</td>
{% if outputs %}<td>{{ "%.2e"|format(outputs[t.k][0]) }}</td>
<td>{{ "%.2e"|format(outputs[t.k][1]) }}</td>
{% endif %}</tr>{% endfor %}</table>
{% if outputs %}<p>Output error: squared error of an expert's output over its square, on its own
calibration tokens.</p>{% endif %}
{% for title, image in plots %}<h2>{{ title }}</h2><img alt="{{ title }}" src="{{ image }}">{% endfor %}
<h2>Layers, SQNR in dB</h2>
<table><tr><th>layer</th>{% for k in tiers %}<th>k={{ k }}</th>{% endfor %}</tr>
{% for layer in facts.layers %}<tr><td>{{ layer.prefix }}</td>
{% for value in layer.sqnr_db %}<td>{{ "%.2f"|format(value) }}</td>{% endfor %}</tr>{% endfor %}</table>
<h2>The {{ worst|length }} experts with the largest error at k = {{ shown }}</h2>
<table><tr><th>layer</th><th>expert</th><th>{{ measure }}</th><th>calibration tokens</th></tr>
{% for row in worst %}<tr><td>{{ row.layer }}</td><td>{{ row.expert }}</td>
<td>{{ "%.3e"|format(row.error) }}</td><td>{{ row.tokens }}</td></tr>{% endfor %}</table>
</body></html>
"""


@dataclass(frozen=True)
class ExpertErrors:
    """Relative squared errors of every expert.

    Attributes:
        weight: float64 [L, E, 9], of its weights, gain applied.
        output: float64 [L, E, 9], of its outputs; None without calibration.
        present: bool [L, E], False past the experts of a layer.
    """

    weight: Tensor
    output: Tensor | None
    present: Tensor

    @classmethod
    def of(cls, checkpoint: CheckpointReader) -> "ExpertErrors":
        """Raises DpaError if the checkpoint has no quality file."""
        if QUALITY not in checkpoint.manifest.files:
            raise DpaError(f"{checkpoint.path} has no {QUALITY}; encode the model again")
        checkpoint.verify_hashes([QUALITY])
        tables = load_file(checkpoint.path / QUALITY)
        experts = torch.tensor([layer.num_experts for layer in checkpoint.manifest.layers])
        present = torch.arange(tables["power"].shape[1]) < experts[:, None]
        power = tables["power"].clamp_min(1e-300)[..., None]
        return cls(tables["error_with_gain"] / power, tables.get("output_error"), present)

    @property
    def shown(self) -> Tensor:
        """Output errors where they were measured, else those of the weights."""
        return self.weight if self.output is None else self.output

    @property
    def measure(self) -> str:
        return "relative weight error" if self.output is None else "relative output error"


def write_report(checkpoint: CheckpointReader, path: Path) -> None:
    """Write the report on ``checkpoint`` to ``path``.

    Raises:
        DpaError: matplotlib or jinja2 is not installed, or the checkpoint has no quality file.
    """
    jinja2, pyplot = report_libraries()
    errors = ExpertErrors.of(checkpoint)
    facts = inspect(checkpoint)
    outputs = {}
    if errors.output is not None:
        for k in TIERS:
            values = errors.output[..., k][errors.present]
            outputs[k] = (float(values.median()), float(values.max()))
    html = jinja2.Template(PAGE, autoescape=True).render(
        facts=facts,
        outputs=outputs,
        tiers=TIERS,
        shown=SHOWN,
        measure=errors.measure,
        worst=worst_experts(checkpoint, errors),
        plots=_plots(pyplot, errors, facts),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, partial(_write_text, html))


def _write_text(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")


def report_libraries() -> tuple[Any, Any]:
    """(jinja2, matplotlib.pyplot).

    Raises:
        DpaError: one is not installed.
    """
    try:
        import jinja2
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise DpaError(
            f"reports and plots need {error.name}; install them: pip install 'vllm-dpa[report]'"
        ) from None
    return jinja2, pyplot


def worst_experts(checkpoint: CheckpointReader, errors: ExpertErrors) -> list[dict[str, Any]]:
    """The experts with the largest errors at tier ``SHOWN``, worst first."""
    table = errors.shown[..., SHOWN].masked_fill(~errors.present, -1)
    count = min(WORST, int(errors.present.sum()))
    notes = checkpoint.manifest.encoder.get("layers", {})
    rows = []
    for index in table.flatten().topk(count).indices.tolist():
        layer = checkpoint.manifest.layers[index // table.shape[1]].prefix
        expert = index % table.shape[1]
        calibration = notes.get(layer, {}).get("calibration")
        tokens = calibration["tokens_per_expert"][expert] if calibration else "-"
        value = float(table.flatten()[index])
        rows.append({"layer": layer, "expert": expert, "error": value, "tokens": tokens})
    return rows


def _plots(pyplot: Any, errors: ExpertErrors, facts: dict[str, Any]) -> list[tuple[str, str]]:
    draw = (
        (f"{errors.measure.capitalize()} over tiers, by layer", _over_tiers),
        (f"{errors.measure.capitalize()} of every expert at k = {SHOWN}", _heat_map),
        ("SQNR of the experts' weights", _histogram),
    )
    out = []
    for title, fill in draw:
        figure, axes = pyplot.subplots(figsize=(9, 4.2), layout="constrained")
        fill(figure, axes, errors)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110)
        pyplot.close(figure)
        out.append((title, "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()))
    return out


def _over_tiers(figure: Any, axes: Any, errors: ExpertErrors) -> None:
    for number, (row, present) in enumerate(zip(errors.shown, errors.present, strict=True)):
        median = row[present][:, MIN_CHUNKS:].median(0).values
        label = f"layer {number}" if len(errors.shown) <= 12 else None
        axes.plot(TIERS, median, marker="o", markersize=3, label=label)
    axes.set(xlabel="chunks k", ylabel=f"{errors.measure}, median of experts", yscale="log")
    axes.grid(alpha=0.3)
    if len(errors.shown) <= 12:
        axes.legend(ncols=2)


def _heat_map(figure: Any, axes: Any, errors: ExpertErrors) -> None:
    table = errors.shown[..., SHOWN].clamp_min(1e-12).log10()
    image = axes.imshow(table.masked_fill(~errors.present, torch.nan), aspect="auto")
    axes.set(xlabel="expert", ylabel="MoE layer")
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, label=f"log10 of the {errors.measure}")


def _histogram(figure: Any, axes: Any, errors: ExpertErrors) -> None:
    sqnr = {
        k: (-10 * errors.weight[..., k][errors.present].clamp_min(1e-12).log10()).tolist()
        for k in TIERS
    }
    bins = (min(map(min, sqnr.values())), max(map(max, sqnr.values())))
    for k, values in sqnr.items():
        axes.hist(values, bins=100, range=bins, alpha=0.7, label=f"k = {k}")
    axes.set(xlabel="SQNR in dB, gain applied", ylabel="experts")
    axes.legend(ncols=2)
