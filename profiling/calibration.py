# SPDX-License-Identifier: Apache-2.0
"""Calibration: text in, the tokens that every expert of a layer really sees out.

The full-precision model runs layer by layer: one decoder layer is in memory at a time, and all
calibration tokens pass it before the next one is read.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from vllm_dpa.checkpoint import LayerShape
from vllm_dpa.errors import DpaError
from vllm_dpa.profiling.layer_fit import one_thread_each
from vllm_dpa.profiling.source import SourceCheckpoint, layer_number

# Sequences that run through a layer at once.
BATCH_WINDOWS = 8
# A text is read up to so many characters per token asked for: enough to choose windows from.
CHARACTERS_PER_TOKEN = 32


class CalibrationOptions(BaseModel):
    """How much of the calibration text is used.

    Attributes:
        max_tokens: tokens to run through the model.
        window: tokens per sequence.
        seed: which windows are taken, where the text has more than ``max_tokens``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_tokens: Annotated[int, Field(ge=1)] = 131072
    window: Annotated[int, Field(ge=2)] = 256
    seed: Annotated[int, Field(ge=0)] = 0


def read_documents(source: str) -> Iterator[str]:
    """Texts of a UTF-8 file, of a JSON Lines file (``text`` of every line) or of a dataset id
    (``text`` of the train split, through the ``datasets`` library).

    Raises:
        DpaError: unreadable, or a record without text.
    """
    path = Path(source)
    if not path.exists() and "/" in source and not path.suffix:
        yield from _dataset(source)
        return
    try:
        if path.suffix not in (".jsonl", ".json"):
            yield path.read_text(encoding="utf-8")
            return
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _text_of(json.loads(line), f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise DpaError(f"{path} cannot be read as UTF-8 text: {error}") from None
    except json.JSONDecodeError as error:
        raise DpaError(f"{path}, line {number}: not JSON ({error}); one object per line") from None


def _text_of(record: object, where: str) -> str:
    if isinstance(record, dict) and isinstance(record.get("text"), str):
        return str(record["text"])
    raise DpaError(f'{where}: a record needs a string "text"')


def _dataset(name: str) -> Iterator[str]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise DpaError(
            f"{name} is no file; to take it as the id of a dataset, install: pip install datasets"
        ) from None
    try:
        records = load_dataset(name, split="train", streaming=True)
        for number, record in enumerate(records):
            yield _text_of(record, f"dataset {name}, record {number}")
    except (OSError, ValueError, RuntimeError) as error:
        raise DpaError(f"dataset {name} cannot be read: {str(error).splitlines()[0]}") from None


def token_windows(documents: Iterator[str], tokenizer: Any, options: CalibrationOptions) -> Tensor:
    """Whole windows of tokens, int64 [W, window]; documents follow each other without a gap.

    Raises:
        DpaError: less than one window of text.
    """
    ids: list[int] = []
    limit = CHARACTERS_PER_TOKEN * options.max_tokens
    for document in documents:
        encoded = tokenizer(document[:limit], add_special_tokens=False, verbose=False)
        ids += encoded["input_ids"]
        limit -= len(document)
        if limit <= 0:
            break
    count = len(ids) // options.window
    if count == 0:
        raise DpaError(
            f"the calibration text has {len(ids)} tokens, one window needs {options.window}"
        )
    windows = torch.tensor(ids[: count * options.window]).view(count, options.window)
    wanted = max(1, options.max_tokens // options.window)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(options.seed))
    return windows[order[:wanted].sort().values]


@dataclass(frozen=True)
class LayerInputs:
    """What the routed experts of one layer see.

    Attributes:
        hidden: float32 [T, H], the layer's inputs.
        ids: int64 [T, K], experts of every token.
        gates: float32 [T, K].
        num_experts: E.
    """

    hidden: Tensor
    ids: Tensor
    gates: Tensor
    num_experts: int

    def of_expert(self, expert: int) -> tuple[Tensor, Tensor]:
        """Inputs float32 [n, H] of one expert and the weight of each, float32 [n].

        A token weighs as much as its gate. With fewer routed tokens than columns the Hessian would
        have no full rank; then tokens of the whole layer, evenly spaced, make up for the missing
        share, so that an expert without any gets the layer's mean Hessian.
        """
        token, slot = torch.where(self.ids == expert)
        gate = self.gates[token, slot].abs()
        wanted = self.hidden.shape[1]
        if len(token) >= wanted and float(gate.sum()) > 0:
            return self.hidden[token], gate
        share = len(token) / wanted if float(gate.sum()) > 0 else 0.0
        more = torch.linspace(0, len(self.hidden) - 1, wanted).long().unique()
        filling = torch.full((len(more),), (1 - share) / len(more))
        own = share * gate / gate.sum().clamp_min(1e-30)
        return self.hidden[torch.cat((token, more))], torch.cat((own, filling))

    def counts(self) -> Tensor:
        """Tokens routed to every expert, int64 [E]."""
        return torch.bincount(self.ids.flatten(), minlength=self.num_experts)

    def record(self) -> dict[str, Any]:
        """For the manifest: tokens per expert, and the experts that had too few."""
        counts = self.counts().tolist()
        few = [e for e, n in enumerate(counts) if n < self.hidden.shape[1]]
        return {"tokens_per_expert": counts, "filled_with_layer_tokens": few}


class Calibration:
    """Inputs of every MoE layer on the calibration text, one layer at a time.

    Args:
        source: the full-precision model.
        documents: calibration text, see :func:`read_documents`.
        options: how much of it.
        device: where the model runs.

    Raises:
        DpaError: the text is too short, or transformers cannot build the model.
    """

    def __init__(
        self,
        source: SourceCheckpoint,
        documents: Iterator[str],
        options: CalibrationOptions,
        device: torch.device,
    ) -> None:
        # Takes seconds, and stage A and plans do without.
        from transformers import AutoTokenizer

        self._source = source
        self._options = options
        self._device = device
        tokenizer = AutoTokenizer.from_pretrained(source.path, local_files_only=True)
        self._windows = token_windows(documents, tokenizer, options)
        self._stream: LayerStream | None = None

    def inputs(self, prefix: str) -> LayerInputs:
        """Inputs of the experts of one layer; fast in the model's order of layers.

        Raises:
            DpaError: the checkpoint lacks a tensor of the model.
        """
        if self._stream is None or not self._stream.is_ahead(prefix):
            self._stream = LayerStream(self._source, self._windows, self._device)
        return self._stream.advance_to(prefix)

    def identity(self) -> dict[str, Any]:
        digest = hashlib.sha256(self._windows.numpy().tobytes()).hexdigest()
        return {**self._options.model_dump(), "tokens": self._windows.numel(), "sha256": digest}

    def working_bytes(self, shape: LayerShape) -> int:
        return calibration_bytes(self._windows.numel(), self._source.config, shape)


def calibration_bytes(tokens: int, config: dict[str, Any], shape: LayerShape) -> int:
    """Memory of the calibration data beside a layer's fit, float32: the hidden states, the inputs of
    the experts (in parts, then as one), two copies of a layer's weights, and for every worker its
    expert's tokens three times."""
    share = int(config.get("num_experts_per_tok") or 1) / shape.num_experts
    worker = 3 * share * tokens * (shape.hidden_size + shape.intermediate_size)
    values = 3 * tokens * shape.hidden_size + 2 * shape.num_weights
    return 4 * int(values + torch.get_num_threads() * worker)


class LayerStream:
    """A causal language model that runs one decoder layer after the other over all windows.

    Args:
        source: where the weights are.
        windows: int64 [W, window].
        device: where layers run.
    """

    def __init__(self, source: SourceCheckpoint, windows: Tensor, device: torch.device) -> None:
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig, AutoModelForCausalLM

        self._source, self._device = source, device
        self._experts = {layer.prefix: layer.num_experts for layer in source.layers}
        try:
            config = AutoConfig.from_pretrained(source.path, local_files_only=True)
            with torch.device("meta"):
                self._model = AutoModelForCausalLM.from_config(
                    config, dtype=torch.float32, experts_implementation="eager"
                ).eval()
        except (OSError, ValueError, StrictDataclassError) as error:
            first = str(error).strip().splitlines()[0]
            raise DpaError(f"{source.path}: transformers cannot build it: {first}") from None
        self._inner = self._model.model
        self._inner.rotary_emb = type(self._inner.rotary_emb)(config=config).to(device)
        self._position = 0
        batches = windows.split(BATCH_WINDOWS)
        self._arguments = {len(b): self._catch_arguments(b) for b in batches}
        self._load(self._inner.embed_tokens, "model.embed_tokens")
        with torch.inference_mode():
            self._hidden = [self._inner.embed_tokens(b.to(device)).cpu() for b in batches]
        self._inner.embed_tokens.to("meta")

    def is_ahead(self, prefix: str) -> bool:
        """Whether the layer with these experts is still to come."""
        return layer_number(prefix) >= self._position

    def advance_to(self, prefix: str) -> LayerInputs:
        """Run up to and including the layer with these experts; their inputs on the way."""
        while True:
            captured = self._run_layer(prefix)
            if captured is not None:
                return captured

    @torch.inference_mode()
    def _catch_arguments(self, batch: Tensor) -> list[dict[str, Any]]:
        """What the model passes to each of its decoder layers besides the hidden states."""
        seen: list[dict[str, Any]] = []
        layers = self._inner.layers

        class Done(Exception):
            pass

        def record(hidden: Tensor, *_: Any, **arguments: Any) -> Tensor:
            seen.append(arguments)
            if len(seen) == len(layers):
                raise Done
            return hidden

        for layer in layers:
            layer.forward = record
        embeddings = torch.zeros(*batch.shape, self._model.config.hidden_size, device=self._device)
        try:
            self._inner(inputs_embeds=embeddings, use_cache=False)
        except Done:
            pass
        finally:
            for layer in layers:
                del layer.forward
        return seen

    def _load(self, module: nn.Module, name: str) -> None:
        """Read a module's weights; those of routed experts are stacked."""
        module.to_empty(device=self._device)
        for key, target in module.state_dict(keep_vars=True).items():
            full = f"{name}.{key}"
            prefix, _, matrix = full.rpartition(".")
            if matrix in ("gate_up_proj", "down_proj") and prefix in self._experts:
                for expert in range(len(target)):
                    w13, w2 = self._source.expert(prefix, expert)
                    target.data[expert] = w13 if matrix == "gate_up_proj" else w2
            else:
                self._source.spec(full)
                target.data.copy_(self._source.tensor(full))

    @torch.inference_mode()
    def _run_layer(self, prefix: str) -> LayerInputs | None:
        """Run the next layer over all windows; the inputs of its experts if it is the one asked."""
        number = self._position
        layer = self._inner.layers[number]
        self._load(layer, f"model.layers.{number}")
        local = threading.local()
        wanted = number == layer_number(prefix)
        if wanted:
            experts = self._model.get_submodule(prefix)

            def keep(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
                local.seen = [a.cpu().clone() for a in arguments[:3]]

            hook = experts.register_forward_pre_hook(keep)

        def run(batch: int) -> list[Tensor]:
            with torch.inference_mode():
                hidden = self._hidden[batch]
                out = layer(hidden.to(self._device), **self._arguments[len(hidden)][number])
                self._hidden[batch] = (out[0] if isinstance(out, tuple) else out).cpu()
                return local.seen if wanted else []

        with one_thread_each(self._device) as run_all:
            seen = list(run_all(run, range(len(self._hidden))))
        layer.to("meta")
        self._position += 1
        if not wanted:
            return None
        hook.remove()
        hidden, ids, gates = (torch.cat(parts) for parts in zip(*seen, strict=True))
        return LayerInputs(hidden, ids.long(), gates.float(), self._experts[prefix])
