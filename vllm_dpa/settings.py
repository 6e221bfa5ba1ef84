# SPDX-License-Identifier: Apache-2.0
"""Pydantic models of everything a user or a file may set."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vllm_dpa.errors import DpaError, one_line
from vllm_dpa.kernels.planes import MIN_CHUNKS, NUM_CHUNKS

QUANT_METHOD = "dpa-moe"
FORMAT_VERSION = 1

ScaleLayout = Literal["per_chunk", "geometric"]
GroupSize = Literal[32, 64, 128]
Mode = Literal["dpa", "uniform", "gate_only", "residual_only"]
Scope = Literal["dispatch", "token"]
Activations = Literal["int8", "int16"]


class CheckpointSettings(BaseModel):
    """``quantization_config`` of a DPA checkpoint's config.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    quant_method: Literal["dpa-moe"] = "dpa-moe"
    format_version: Literal[1] = 1
    num_chunks: Literal[8] = 8
    min_chunks: Literal[2] = 2
    group_size: GroupSize = 128
    scale_layout: ScaleLayout = "per_chunk"

    @classmethod
    def parse(cls, config: dict[str, Any], where: str) -> Self:
        """Validate a ``quantization_config``.

        Raises:
            DpaError: it is not one that this version can read.
        """
        version = config.get("format_version")
        if version != FORMAT_VERSION:
            raise DpaError(
                f"{where}: format_version {version!r} is unknown, this vllm-dpa reads version "
                f"{FORMAT_VERSION}; install a matching vllm-dpa or encode the model again"
            )
        try:
            return cls.model_validate(config)
        except ValidationError as error:
            raise one_line(error, f"{where}: quantization_config") from None


class RuntimeOptions(BaseModel):
    """``--additional-config '{"dpa_moe": {...}}'`` of ``vllm serve``.

    Attributes:
        k_bar: budget, mean chunks per active expert of a dispatch (scope ``dispatch``) or per
            expert of a token (scope ``token``).
        mode: what the allocator weighs: ``dpa`` gate^2 x residual, ``gate_only``,
            ``residual_only``, or ``uniform`` k = rint(k_bar), which weighs nothing.
        scope: ``dispatch``, one k per active expert; ``token``, one k per token and expert, so that
            a token's precision does not depend on what else is in the batch.
        activations: how the CPU kernel rounds activations, per token and group of columns: ``int8``
            (an error of 1.3 to 3 % of an expert's output) or ``int16`` (0.04 %).
        max_chunks: chunk files to load; the others are not opened.
        verify_hashes: compare every opened file with the manifest's SHA-256 at load.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    k_bar: Annotated[float, Field(ge=MIN_CHUNKS, le=NUM_CHUNKS, strict=True)] = 4.0
    mode: Mode = "dpa"
    scope: Scope = "dispatch"
    activations: Activations = "int8"
    max_chunks: Annotated[int, Field(ge=MIN_CHUNKS, le=NUM_CHUNKS, strict=True)] = NUM_CHUNKS
    verify_hashes: Annotated[bool, Field(strict=True)] = True

    @model_validator(mode="after")
    def _budget_is_resident(self) -> Self:
        if "k_bar" in self.model_fields_set and self.k_bar > self.max_chunks:
            raise ValueError(
                f"k_bar {self.k_bar:g} is more than max_chunks {self.max_chunks}; "
                "lower k_bar or load more chunks"
            )
        return self

    @property
    def initial_k_bar(self) -> float:
        """The budget at start: k_bar, or max_chunks where the default k_bar does not fit."""
        return min(self.k_bar, float(self.max_chunks))

    @classmethod
    def parse(cls, additional_config: object) -> Self:
        """Read the options out of vLLM's ``additional_config``.

        Raises:
            DpaError: an unknown option or a value out of range.
        """
        if not isinstance(additional_config, dict):
            return cls()
        for key in additional_config:
            if key.startswith("dpa") and key != "dpa_moe":
                raise DpaError(f"--additional-config: unknown key {key!r}; did you mean 'dpa_moe'?")
        where = "--additional-config dpa_moe"
        options = additional_config.get("dpa_moe", {})
        if not isinstance(options, dict):
            raise DpaError(f"{where}: must be an object of options (got {options!r})")
        try:
            return cls.model_validate(options)
        except ValidationError as error:
            message = str(one_line(error, where))
            if "unknown option" in message:
                message += f"; known options: {', '.join(cls.model_fields)}"
            raise DpaError(message) from None
