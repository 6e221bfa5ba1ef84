# SPDX-License-Identifier: Apache-2.0
"""The ``vllm-dpa`` command. Heavy imports wait for the command that needs them."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from vllm_dpa import __version__
from vllm_dpa.errors import DpaError, one_line

if TYPE_CHECKING:
    import torch

    from vllm_dpa.checkpoint import CheckpointReader
    from vllm_dpa.profiling.calibration import Calibration
    from vllm_dpa.profiling.layer_fit import EncodeOptions, LayerFitter
    from vllm_dpa.profiling.source import SourceCheckpoint

app = typer.Typer(
    name="vllm-dpa",
    help="Encode Mixture-of-Experts models so that expert precision is a run-time decision.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# Results go to stdout, progress and messages to stderr, so that --json can be piped.
console = Console()
log = Console(stderr=True)


class Layout(StrEnum):
    per_chunk = "per_chunk"
    geometric = "geometric"


class ScopeName(StrEnum):
    dispatch = "dispatch"
    token = "token"


Options = TypeVar("Options", bound=BaseModel)

OutArgument = Annotated[Path, typer.Argument(metavar="OUT", help="Folder of an encoded model.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
WindowOption = Annotated[
    int, typer.Option(min=2, help="Tokens per sequence that the text is cut into.")
]

ReportOption = Annotated[
    Path | None, typer.Option(metavar="FILE.html", help="Write a report with plots.")
]
DeviceOption = Annotated[str, typer.Option(metavar="cpu|cuda:N", help="Where to compute.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vllm-dpa {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


@app.command("encode")
def encode_command(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Folder of a Hugging Face MoE model.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create.")],
    scale_layout: Annotated[
        Layout,
        typer.Option(help="One scale per chunk and group, or one per group, halved per chunk."),
    ] = Layout.geometric,
    group_size: Annotated[
        int, typer.Option(help="Input columns that share a scale: 32, 64 or 128.")
    ] = 128,
    tier_exponent: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=2.0,
            help="Larger favours many chunks (k = 8), smaller favours few (k = 2).",
        ),
    ] = 0.5,
    target_tiers: Annotated[
        str, typer.Option(metavar="K,K,..", help="The numbers of chunks that will be used.")
    ] = "2,3,4,5,6,7,8",
    calibration: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Text like what will be served: a UTF-8 file, a .jsonl file with a text per line, "
            "or the id of a dataset. Without it the fit knows the weights alone.",
        ),
    ] = None,
    calibration_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of the calibration text to use.")
    ] = 131072,
    refine: Annotated[
        bool,
        typer.Option(
            "--refine", help="Train scales and offsets on the experts' outputs afterwards (slow)."
        ),
    ] = False,
    seed: Annotated[
        int, typer.Option(min=0, help="Which part of a longer calibration text is used.")
    ] = 0,
    device: DeviceOption = "cpu",
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="Encode the I-th of N parts of the layers alone; `vllm-dpa merge` joins them.",
        ),
    ] = None,
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Say what it will take and stop; a config.json is enough."),
    ] = False,
    report: ReportOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Encode the routed experts of MODEL into OUT, which `vllm serve OUT` then serves.

    Interrupted at any moment, the same command goes on where it stopped.
    """
    from vllm_dpa.profiling.encode import encode_shard, workspace_of
    from vllm_dpa.profiling.layer_fit import EncodeOptions
    from vllm_dpa.profiling.source import SourceCheckpoint
    from vllm_dpa.profiling.workspace import Shard

    options = _options(
        EncodeOptions,
        scale_layout=scale_layout.value,
        group_size=group_size,
        tier_exponent=tier_exponent,
        target_tiers=tuple(int(k) for k in _numbers(target_tiers, "--target-tiers")),
    )
    if plan:
        tokens = None if calibration is None else calibration_tokens
        _print_plan(model, options, tokens, _device(device), as_json)
        return
    part = Shard() if shard is None else Shard.parse(shard)
    if shard is not None and report is not None:
        raise DpaError("a shard has no report; give --report to vllm-dpa merge")
    if report is not None:
        _report_libraries()
    source = SourceCheckpoint(model)
    workspace_of(out)  # before the calibration text is read
    fitter = _fitter(source, calibration, calibration_tokens, refine, seed, device)
    weights = sum(layer.num_weights for layer in part.of(source.layers))
    with _progress("encoding weights", weights) as advance:
        encode_shard(model, out, options, fitter, advance, part)
    if shard is None:
        merge_command(model, out, report)
    else:
        log.print(f"shard {shard} of {out} is encoded; when all are: vllm-dpa merge {model} {out}",
                  soft_wrap=True)  # fmt: skip


@app.command("merge")
def merge_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of the model.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create.")],
    report: ReportOption = None,
) -> None:
    """Join the shards of an encode into OUT."""
    from vllm_dpa.checkpoint import CheckpointReader
    from vllm_dpa.profiling.encode import merge

    if report is not None:
        _report_libraries()
    manifest = merge(model, out)
    quality = ", ".join(f"k={t.k} {t.sqnr_db:.1f}" for t in manifest.quality.tiers)
    log.print(f"{out}: {len(manifest.layers)} MoE layers, SQNR in dB: {quality}", soft_wrap=True)
    if report is not None:
        _write_report(CheckpointReader(out), report)


def _report_libraries() -> None:
    """Fails before the work, not after it, where the report's libraries are missing."""
    from vllm_dpa.profiling.report import report_libraries

    report_libraries()


def _write_report(checkpoint: "CheckpointReader", path: Path) -> None:
    from vllm_dpa.profiling.report import write_report

    write_report(checkpoint, path)
    log.print(f"report: {path}", soft_wrap=True)


def _print_plan(
    model: Path, options: "EncodeOptions", tokens: int | None, device: "torch.device", as_json: bool
) -> None:
    from vllm_dpa.profiling.plan import make_plan

    log.print("fitting a few random experts to measure the speed...", soft_wrap=True)
    found = make_plan(model, options, tokens, device)
    if as_json:
        _print_json(found.as_json())
        return
    rest = "not known without the weights" if found.rest_bytes is None else _gib(found.rest_bytes)
    sizes = ", ".join(f"k={k} {_gib(size)}" for k, size in found.output_bytes.items())
    seconds = found.fit_seconds + found.calibration_seconds
    console.print(
        f"{found.weights / 1e9:.2f} G weights of {found.experts} experts in {found.layers} layers\n"
        f"experts on disk: {sizes}\n"
        f"everything else: {rest}\n"
        f"free disk needed: {_gib(found.disk_bytes)}\n"
        f"memory of one process: {_gib(found.memory_bytes)}\n"
        f"speed: {found.weights_per_second / 1e6:.2f} M weights per second on {found.threads} threads\n"
        f"time in one process: {seconds / 3600:.2f} h, {found.calibration_seconds / 3600:.2f} h of it "
        "for running the calibration text",
        soft_wrap=True,
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _fitter(
    source: "SourceCheckpoint",
    calibration: str | None,
    tokens: int,
    refine: bool,
    seed: int,
    device: str,
) -> "LayerFitter":
    from vllm_dpa.profiling.calibration import Calibration, CalibrationOptions, read_documents
    from vllm_dpa.profiling.fitters import StageA, StageB

    place = _device(device)
    if calibration is None and refine:
        raise DpaError("--refine trains on the experts' outputs: give a --calibration text")
    if calibration is None:
        log.print(
            "no --calibration text: fitting the weights alone (stage A); with a text like what will "
            "be served the error is a quarter smaller",
            soft_wrap=True,
        )
        return StageA(place)
    options = _options(CalibrationOptions, max_tokens=tokens, seed=seed)
    return StageB(Calibration(source, read_documents(calibration), options, place), place, refine)


def _device(name: str) -> "torch.device":
    import torch

    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).strip().splitlines()[0]
        raise DpaError(f"--device {name} cannot be used: {first}") from None
    return device


@app.command("profile")
def profile_command(
    out: OutArgument,
    reference: Annotated[Path, typer.Option(help="Folder of the model that was encoded.")],
    calibration: Annotated[
        str, typer.Option(metavar="TEXT", help="Text like what will be served, as for encode.")
    ],
    max_tokens: Annotated[int, typer.Option(min=1, help="Calibration tokens to use.")] = 8192,
    window: WindowOption = 256,
    device: DeviceOption = "cpu",
    check_diagonal: Annotated[
        bool,
        typer.Option(
            "--check-diagonal",
            help="Measure nothing new; compare the allocator's cost with the true error over random "
            "allocations.",
        ),
    ] = False,
) -> None:
    """Measure how far every expert's output is off at every number of chunks (mode dpa needs it)."""
    from vllm_dpa.checkpoint import CheckpointReader
    from vllm_dpa.profiling.calibration import Calibration, CalibrationOptions, read_documents
    from vllm_dpa.profiling.residuals import ProfileOptions, profile
    from vllm_dpa.profiling.source import SourceCheckpoint

    options = _options(CalibrationOptions, max_tokens=max_tokens, window=window)
    checkpoint, source = CheckpointReader(out), SourceCheckpoint(reference)
    inputs = Calibration(source, read_documents(calibration), options, _device(device))
    if check_diagonal:
        _print_diagonal(checkpoint, source, inputs)
        return
    experts = sum(layer.num_experts for layer in checkpoint.manifest.layers)
    with _progress("profiling experts", experts) as advance:
        residuals, record = profile(checkpoint, source, inputs, ProfileOptions(), advance)
    checkpoint.write_residuals(residuals, record)
    alone = sum(len(experts) for experts in record["fallback_experts"].values())
    note = f"; {alone} experts saw no token and were measured on others' tokens" if alone else ""
    tokens = record["calibration"]["tokens"]
    log.print(f"{out}: residuals from {tokens} tokens{note}", soft_wrap=True)


def _print_diagonal(
    checkpoint: "CheckpointReader", source: "SourceCheckpoint", inputs: "Calibration"
) -> None:
    from vllm_dpa.profiling.diagonal import BUDGETS
    from vllm_dpa.profiling.diagonal import check_diagonal as check

    residuals = checkpoint.require_residuals("dpa")
    with _progress("checking layers", len(checkpoint.manifest.layers)) as advance:
        rows = check(checkpoint, source, inputs, residuals, advance)
    table = Table(title="Spearman correlation of the allocator's cost with the true error")
    for column in ("layer", *(f"k-bar {k}" for k in BUDGETS)):
        table.add_column(column, justify="left" if column == "layer" else "right")
    for layer in checkpoint.manifest.layers:
        values = [f"{row['spearman']:.4f}" for row in rows if row["layer"] == layer.prefix]
        table.add_row(layer.prefix, *values)
    console.print(table)


@app.command("inspect")
def inspect_command(
    out: OutArgument,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare every file with its SHA-256.")
    ] = False,
    reference: Annotated[
        Path | None, typer.Option(help="Measure SQNR again, against this unencoded model.")
    ] = None,
    report: ReportOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what OUT holds: bytes, bits per weight and signal-to-noise ratio per tier."""
    from vllm_dpa.checkpoint import CheckpointReader
    from vllm_dpa.profiling.inspection import inspect
    from vllm_dpa.profiling.source import SourceCheckpoint

    checkpoint = CheckpointReader(out)
    files = checkpoint.manifest.files
    if verify:
        with _progress("verifying bytes", sum(f.size for f in files.values())) as advance:
            checkpoint.verify_hashes(list(files), advance)
    source = None if reference is None else SourceCheckpoint(reference)
    experts = sum(layer.num_experts for layer in checkpoint.manifest.layers)
    with _progress("measuring experts", experts if source else 0) as advance:
        facts = inspect(checkpoint, source, advance)
    if report is not None:
        _write_report(checkpoint, report)
    if as_json:
        _print_json(facts)
        return
    table = Table(title=f"{facts['scale_layout']} scales, groups of {facts['group_size']}, "
                        f"{len(facts['layers'])} MoE layers")  # fmt: skip
    for column in ("k", "MiB", "bits per weight", "SQNR dB", "SQNR dB with gain"):
        table.add_column(column, justify="right")
    for t in facts["tiers"]:
        table.add_row(
            str(t["k"]),
            f"{t['bytes'] / 2**20:.1f}",
            f"{t['bits_per_weight']:.3f}",
            f"{t['sqnr_db']:.1f}",
            f"{t['sqnr_db_with_gain']:.1f}",
        )
    console.print(table)
    console.print(f"scale overhead {100 * facts['scale_overhead']:.1f} %")
    profiled = facts["residuals"]
    console.print(
        f"residuals from {profiled['calibration']['tokens']} tokens"
        if profiled
        else "no residuals: run vllm-dpa profile, or serve with mode gate_only or uniform"
    )
    if verify:
        console.print(f"{len(files)} files verified")


@app.command("evaluate")
def evaluate_command(
    out: OutArgument,
    reference: Annotated[Path, typer.Option(help="Folder of the model that was encoded.")],
    text: Annotated[Path, typer.Option(help="UTF-8 text that the model has not seen.")],
    k_bar: Annotated[
        str, typer.Option(metavar="K,K,..", help="Budgets: mean chunks per active expert, 2 to 8.")
    ] = "2,3,4",
    modes: Annotated[
        str, typer.Option(metavar="MODE,..", help="dpa, uniform, gate_only, residual_only.")
    ] = "uniform,dpa",
    scope: Annotated[
        ScopeName, typer.Option(help="One budget per dispatch, or one per token.")
    ] = ScopeName.dispatch,
    dispatch_tokens: Annotated[
        str, typer.Option(metavar="N,N,..", help="Consecutive tokens that form one dispatch.")
    ] = "16",
    activations: Annotated[
        str, typer.Option(metavar="TYPE", help="int8 or int16: how the CPU kernel rounds inputs.")
    ] = "int8",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the text to use.")] = 4096,
    window: WindowOption = 256,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the rows as CSV too.")
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write plots: frontier, reduction, layers, gates."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare OUT with full precision on a text: KL divergence, perplexity, bytes per token."""
    from vllm_dpa.checkpoint import CheckpointReader
    from vllm_dpa.profiling.evaluate import EvaluateOptions, evaluate
    from vllm_dpa.profiling.evaluation_plots import write_csv, write_plots
    from vllm_dpa.profiling.reference_model import ReferenceModel

    options = _options(
        EvaluateOptions,
        modes=_list(modes, "--modes"),
        k_bars=_numbers(k_bar, "--k-bar"),
        scope=scope.value,
        dispatch_tokens=_list(dispatch_tokens, "--dispatch-tokens"),
        activations=activations,
    )
    if plots is not None:
        _report_libraries()
    checkpoint = CheckpointReader(out)
    model = ReferenceModel.load(reference)
    windows = model.windows(text, window, max_tokens)
    settings = len(options.modes) * len(options.k_bars) * len(options.dispatch_tokens)
    sequences = len(windows) * settings
    with _progress("evaluating sequences", sequences) as advance:
        report = evaluate(checkpoint, model, windows, options, advance)
    if csv is not None:
        write_csv(report, csv)
    if plots is not None:
        for path in write_plots(report, plots):
            log.print(f"plot: {path}", soft_wrap=True)
    if as_json:
        _print_json(report.as_json())
        return
    table = Table(
        title=f"{report.tokens} tokens; full precision has perplexity "
        f"{report.reference_perplexity:.3f}; scope {scope.value}; experts at k = 8: "
        f"{report.stored_bytes / 2**20:.1f} MiB; tokens of a dispatch, KL in nats, KiB read per token"
    )
    for column in ("mode", "tokens", "k-bar", "KL", "± 95 %", "ppl", "top-1 %", "KiB"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for row in report.rows:
        table.add_row(
            row.mode,
            str(row.dispatch_tokens),
            f"{row.k_bar:g}",
            f"{row.kl:.5f}",
            "-" if row.kl_ci95 is None else f"{row.kl_ci95:.5f}",
            f"{row.perplexity:.3f}",
            f"{100 * row.top1_agreement:.2f}",
            f"{row.bytes_read_per_token / 1024:.1f}",
        )
    console.print(table)


@app.command("kernels")
def kernels_command(as_json: JsonOption = False) -> None:
    """Say which native kernels this machine has and which are active."""
    import torch

    from vllm_dpa.kernels.cpu import native

    try:
        facts = {
            "extension": str(native.library()._name),
            "cpu_isa": native.active_isa(),
            "cpu_isas": native.available_isas(),
            "threads": torch.get_num_threads(),
        }
    except RuntimeError as error:
        raise DpaError(str(error)) from None
    if as_json:
        _print_json(facts)
        return
    console.print(f"CPU kernels: {facts['cpu_isa']} active, {facts['threads']} threads")
    console.print(f"available here: {', '.join(native.available_isas())}")
    console.print(f"choose another with {native.ISA_VARIABLE}; extension: {facts['extension']}")


bench = typer.Typer(help="Measure speed, as ratios interleaved in one run.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command("cpu")
def bench_cpu_command(
    shapes: Annotated[str, typer.Option(metavar="NAME,..", help="olmoe, qwen3-30b.")] = "olmoe",
    layouts: Annotated[
        str, typer.Option(metavar="NAME,..", help="per_chunk, geometric.")
    ] = "per_chunk,geometric",
    isas: Annotated[
        str,
        typer.Option(metavar="NAME,..", help="amx, avx512, avx2, portable; empty: the active one."),
    ] = "",
    threads: Annotated[str, typer.Option(metavar="N,..", help="Numbers of threads.")] = "1",
    tokens: Annotated[str, typer.Option(metavar="M,..", help="Batch sizes.")] = "1,4,16,128",
    k: Annotated[str, typer.Option(metavar="K,..", help="Chunks read, 1 to 8.")] = "2,4,8",
    activations: Annotated[str, typer.Option(metavar="TYPE", help="int8 or int16.")] = "int8",
    path: Annotated[str, typer.Option(metavar="NAME", help="auto, lut or tile.")] = "auto",
    pairs: Annotated[int, typer.Option(min=1, help="Interleaved repetitions.")] = 10,
    as_json: JsonOption = False,
) -> None:
    """MoE kernel against vLLM's in bf16, weights from DRAM: ms, ratio, GB/s, share of the roof."""
    from vllm_dpa.benchmarks.cpu_moe import SHAPES, Options, run
    from vllm_dpa.kernels.cpu.fused_moe import PATHS, PRECISIONS
    from vllm_dpa.kernels.cpu.native import available_isas
    from vllm_dpa.kernels.planes import SCALE_LAYOUTS

    def names(text: str, option: str, known: Iterable[str]) -> tuple[str, ...]:
        chosen = _list(text, option)
        for name in chosen:
            if name not in known:
                raise typer.BadParameter(
                    f"{name!r} is not one of {', '.join(known)}", param_hint=option
                )
        return chosen

    def integers(text: str, option: str, most: int) -> tuple[int, ...]:
        values = _numbers(text, option)
        if any(value != int(value) or not 1 <= value <= most for value in values):
            raise typer.BadParameter(f"{text!r}: integers from 1 to {most}", param_hint=option)
        return tuple(int(value) for value in values)

    options = Options(
        shapes=names(shapes, "--shapes", SHAPES),
        layouts=names(layouts, "--layouts", SCALE_LAYOUTS),
        isas=names(isas, "--isas", available_isas()) if isas else (),
        threads=integers(threads, "--threads", 1024),
        tokens=integers(tokens, "--tokens", 65536),
        k=integers(k, "--k", 8),
        activations=names(activations, "--activations", PRECISIONS)[0],
        path=names(path, "--path", PATHS)[0],
        pairs=pairs,
    )
    run(options, as_json)


def _options(kind: type[Options], **values: Any) -> Options:
    try:
        return kind(**values)
    except ValidationError as error:
        raise one_line(error, "option") from None


def _list(text: str, option: str) -> tuple[str, ...]:
    items = tuple(part.strip() for part in text.split(",") if part.strip())
    if not items:
        raise typer.BadParameter("give at least one value", param_hint=option)
    return items


def _numbers(text: str, option: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in _list(text, option))
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a list of numbers like 2,3.5,4", param_hint=option
        ) from None


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar with the time left, on stderr; silent where that is not a terminal."""
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=log, disable=total == 0 or not log.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda amount: progress.update(task, advance=amount)


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=1))


def _fail(message: str) -> NoReturn:
    log.print(f"vllm-dpa: error: {message}", style="bold red", soft_wrap=True, highlight=False,
              markup=False)  # fmt: skip
    sys.exit(1)


def main() -> None:
    """Console entry point: exit code 0, 1 (bad input, or interrupted) or 2 (bad usage)."""
    # Spinning OpenMP threads starve each other where several processes share the cores: two profiles
    # at once on two cores took nine times as long. To be said before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        app()
    except DpaError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename or 'input/output'}: {error.strerror or error}")
