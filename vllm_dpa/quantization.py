# SPDX-License-Identifier: Apache-2.0
"""``DpaMoEConfig``: what vLLM asks of a quantization method."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import (
    QUANTIZATION_METHODS,
    register_quantization_config,
)
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)

from vllm_dpa import runtime, vllm_seams
from vllm_dpa.errors import DpaError
from vllm_dpa.moe_method import DpaMoEMethod
from vllm_dpa.settings import QUANT_METHOD, CheckpointSettings, RuntimeOptions


class DpaMoEConfig(QuantizationConfig):
    """Quantization config of a DPA checkpoint: routed experts are served from their chunks, all
    else stays as it is.

    Args:
        settings: of the checkpoint; None where config.json has no ``quantization_config``, which
            is refused as soon as the model's name is known.
    """

    def __init__(self, settings: CheckpointSettings | None = None) -> None:
        super().__init__()
        vllm_seams.check_version()
        vllm_seams.require_config_check()
        self.settings = settings
        self.model: Path | None = None
        self._opened = False

    @classmethod
    def get_name(cls) -> str:
        return QUANT_METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        # No file of its own: without quantization_config in config.json vLLM then builds the config
        # with no arguments, and maybe_update_config() can say what is wrong.
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "DpaMoEConfig":
        return cls(CheckpointSettings.parse(config, "config.json"))

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        if hf_quant_cfg and hf_quant_cfg.get("quant_method") == QUANT_METHOD:
            return QUANT_METHOD
        return None

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        if self.settings is None:
            raise DpaError(
                f"{model_name} is not encoded for dpa-moe; run: vllm-dpa encode {model_name} OUT, "
                "then serve OUT"
            )
        self.model = Path(model_name)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod()
        if not isinstance(layer, RoutedExperts):
            return None
        state = self._worker()
        if prefix in state.reader.layers:
            return DpaMoEMethod(layer.moe_config, state)
        if self._has_plain_weights(prefix):
            return UnquantizedFusedMoEMethod(layer.moe_config)
        state.reader.layer(prefix)  # raises, naming the layer
        raise AssertionError(prefix)

    def _worker(self) -> runtime.WorkerState:
        """The worker's state; opened with the first layer of a model, so that options and
        checkpoint fail before any weight is read."""
        assert self.model is not None
        if not self._opened:
            options = RuntimeOptions.parse(vllm_seams.additional_config())
            runtime.open_worker(self.model, options, vllm_seams.batch_invariant())
            self._opened = True
        return runtime.worker()

    def _has_plain_weights(self, prefix: str) -> bool:
        """Whether the checkpoint keeps this layer's experts unencoded (draft layers, say)."""
        assert self.model is not None
        for file in self.model.glob("*.safetensors"):
            with safe_open(file, framework="pt") as handle:
                if any(name.startswith(f"{prefix}.") for name in handle.keys()):  # noqa: SIM118
                    return True
        return False


def register_config() -> None:
    """Register with vLLM, once per process."""
    if QUANT_METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(QUANT_METHOD)(DpaMoEConfig)
