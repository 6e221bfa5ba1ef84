# SPDX-License-Identifier: Apache-2.0
"""The full-precision model in transformers: loading, text windows, hooks on its MoE layers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from vllm_dpa.checkpoint import LayerShape
from vllm_dpa.errors import DpaError

# (hidden [T, H], topk_ids [T, K], topk_weights [T, K]) -> routed output [T, H]
ExpertsForward = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class ReferenceModel:
    """A transformers causal LM in float32 and its tokenizer."""

    model: Any
    tokenizer: Any

    @classmethod
    def load(cls, path: Path) -> "ReferenceModel":
        """Raises DpaError if transformers cannot load the folder."""
        transformers_logging.disable_progress_bar()
        try:
            # The default grouped_mm is very slow on a CPU.
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, experts_implementation="eager", local_files_only=True
            )
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise DpaError(
                f"{path} cannot be loaded as a reference model: {_first_line(error)}"
            ) from None
        return cls(model.eval(), tokenizer)

    def windows(self, text: Path, window: int, max_tokens: int) -> Tensor:
        """Token ids of a text file cut into whole windows, int64 [W, window].

        Raises:
            DpaError: the file cannot be read or holds less than one window.
        """
        try:
            content = Path(text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DpaError(f"{text} cannot be read as UTF-8 text: {error}") from None
        # About four bytes a token; cutting first keeps a huge file from being tokenised in full.
        content = content[: 16 * max_tokens]
        ids = self.tokenizer(content, add_special_tokens=False, verbose=False)
        ids = ids["input_ids"][:max_tokens]
        count = len(ids) // window
        if count == 0:
            raise DpaError(f"{text} has {len(ids)} tokens, one window needs {window}")
        return torch.tensor(ids[: count * window], dtype=torch.int64).view(count, window)

    def experts_module(self, layer: LayerShape) -> nn.Module:
        """The module that holds the layer's routed experts.

        Raises:
            DpaError: the model has no such module, or its experts have another shape.
        """
        try:
            module = self.model.get_submodule(layer.prefix)
        except AttributeError:
            raise DpaError(
                f"the reference model has no module {layer.prefix}; is it the model that was encoded?"
            ) from None
        shape = tuple(module.down_proj.shape)
        wanted = (layer.num_experts, layer.hidden_size, layer.intermediate_size)
        if shape != wanted:
            raise DpaError(
                f"{layer.prefix}: the reference model's experts are {shape}, the checkpoint's are "
                f"{wanted}; is it the model that was encoded?"
            )
        return module

    @contextmanager
    def replaced_experts(
        self, forwards: dict[str, ExpertsForward], layers: list[LayerShape]
    ) -> Iterator[None]:
        """Within the context, the routed experts of every layer are computed by ``forwards``."""
        modules = [(self.experts_module(layer), forwards[layer.prefix]) for layer in layers]
        for module, forward in modules:
            module.forward = forward
        try:
            yield
        finally:
            for module, _ in modules:
                del module.forward

    @torch.inference_mode()
    def logits(self, ids: Tensor) -> Tensor:
        """float32 [B, T, V]."""
        return self.model(input_ids=ids, use_cache=False).logits.float()


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
