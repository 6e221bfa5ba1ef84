# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face MoE checkpoint on disk, read tensor by tensor."""

import json
from collections import defaultdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm_dpa.checkpoint import CONFIG, LayerShape, read_json
from vllm_dpa.errors import DpaError
from vllm_dpa.profiling.block_scales import FP8, SUFFIX, block_size, dequantise
from vllm_dpa.profiling.families import family_of
from vllm_dpa.safetensors_stream import DTYPES, Spec

INDEX = "model.safetensors.index.json"


class SourceCheckpoint:
    """Names, layers and tensors of an unencoded model.

    Raises:
        DpaError: not a readable MoE checkpoint of a supported family, or an expert is incomplete.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise DpaError(f"{self.path} is not a folder; give the folder of a downloaded model")
        self.config = read_json(self.path / CONFIG, "a model folder has a config.json")
        self._block = block_size(self.config, str(self.path))
        self._handles: dict[str, Any] = {}
        self.files = self._weight_files()
        self.file_of = {
            name: file
            for file in self.files
            for name in self._handles[file].keys()  # noqa: SIM118 (not a mapping)
        }
        self.family = family_of(self.config, list(self.file_of), str(self.path))
        self._expert_names = self._find_experts()
        self.layers = [self._layer_shape(prefix) for prefix in self._expert_names]

    def _weight_files(self) -> list[str]:
        if (self.path / INDEX).exists():
            index = read_json(self.path / INDEX, "the weight index")
            files = sorted(set(index.get("weight_map", {}).values()))
        else:
            files = sorted(p.name for p in self.path.glob("*.safetensors"))
        if not files:
            raise DpaError(f"{self.path} has no *.safetensors weights; convert the model first")
        for file in files:
            try:
                self._handles[file] = safe_open(self.path / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise DpaError(
                    f"{self.path / file} cannot be read ({error}); download it again"
                ) from None
        return files

    def _find_experts(self) -> dict[str, dict[tuple[int, str], str]]:
        """Layer prefix -> (expert, matrix) -> tensor name, layers in model order."""
        found: dict[str, dict[tuple[int, str], str]] = defaultdict(dict)
        for name in self.file_of:
            match = self.family.experts.match(name)
            if match and match["matrix"] in self.family.matrices:
                found[match["prefix"]][int(match["expert"]), match["matrix"]] = name
        if not found:
            raise DpaError(
                f"{self.path}: no tensor is named like {self.family.experts.pattern}; the experts "
                "of this checkpoint are stored in a way that is not supported"
            )
        return {p: found[p] for p in sorted(found, key=layer_number)}

    def _layer_shape(self, prefix: str) -> LayerShape:
        names = self._expert_names[prefix]
        num_experts = self.family.num_experts(self.config, f"{self.path}/{CONFIG}")
        gate, up, down = self.family.matrices
        intermediate, hidden = self.spec(names.get((0, gate), f"{prefix}.0.{gate}.weight"))[1]
        wanted = {gate: (intermediate, hidden), up: (intermediate, hidden),
                  down: (hidden, intermediate)}  # fmt: skip
        for expert in range(num_experts):
            for matrix, shape in wanted.items():
                name = names.get((expert, matrix))
                if name is None:
                    raise DpaError(
                        f"{self.path}: layer {prefix}, expert {expert}: {matrix} is missing; "
                        "download the model again"
                    )
                if self.spec(name)[1] != shape:
                    raise DpaError(
                        f"{self.path}: {name} has shape {self.spec(name)[1]}, expected {shape}"
                    )
        extra = {expert for expert, _ in names} - set(range(num_experts))
        if extra:
            raise DpaError(
                f"{self.path}: layer {prefix} has expert {min(extra)}, but config.json says "
                f"{num_experts}"
            )
        return LayerShape(
            prefix=prefix,
            num_experts=num_experts,
            hidden_size=hidden,
            intermediate_size=intermediate,
        )

    def spec(self, name: str) -> Spec:
        """(dtype, shape) of a tensor, from the header; bf16 for one that is stored as scaled fp8.

        Raises:
            DpaError: no such tensor, or a dtype that cannot be encoded.
        """
        dtype, shape = self._stored_spec(name)
        return (torch.bfloat16 if self._is_scaled(name) else dtype), shape

    def _stored_spec(self, name: str) -> Spec:
        if name not in self.file_of:
            raise DpaError(f"{self.path}: tensor {name} is missing; download the model again")
        part = self._handles[self.file_of[name]].get_slice(name)
        if part.get_dtype() not in DTYPES:
            raise DpaError(
                f"{self.path}: {name} has dtype {part.get_dtype()}, which is not supported"
            )
        return DTYPES[part.get_dtype()], tuple(part.get_shape())

    def _is_scaled(self, name: str) -> bool:
        return self._block is not None and self._stored_spec(name)[0] == FP8

    def tensor(self, name: str) -> Tensor:
        """A tensor as stored; float32 where it is stored as scaled fp8.

        Raises:
            DpaError: fp8 without scales that fit.
        """
        stored = self._handles[self.file_of[name]].get_tensor(name)
        if self._block is None or stored.dtype != FP8:
            return stored
        scale = name + SUFFIX
        if scale not in self.file_of:
            raise DpaError(f"{self.path}: {name} is fp8, but {scale} is missing; download it again")
        scales = self._handles[self.file_of[scale]].get_tensor(scale)
        return dequantise(stored, scales, self._block, f"{self.path}: {name}")

    def rest(self) -> dict[str, list[str]]:
        """File -> the tensors in it that are no routed expert's, and no scales of other tensors."""
        kept = {
            file: [
                name
                for name, home in self.file_of.items()
                if home == file
                and not self.is_expert(name)
                and not (self._block is not None and name.endswith(SUFFIX))
            ]
            for file in self.files
        }
        return {file: names for file, names in kept.items() if names}

    def rest_bytes(self) -> int:
        """Bytes of :meth:`rest` as it will be written."""
        specs = [self.spec(name) for names in self.rest().values() for name in names]
        return sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in specs)

    def is_expert(self, name: str) -> bool:
        match = self.family.experts.match(name)
        return bool(match and match["matrix"] in self.family.matrices)

    def expert(self, prefix: str, expert: int) -> tuple[Tensor, Tensor]:
        """(w13, w2) of one expert, float32: [2I, H] gate rows then up rows, and [H, I].

        Raises:
            DpaError: a weight is NaN or infinite, or its dtype is not bf16, fp16, fp32 or scaled fp8.
        """
        parts = []
        for matrix in self.family.matrices:
            name = self._expert_names[prefix][expert, matrix]
            weight = self.tensor(name)
            if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
                raise DpaError(
                    f"{self.path}: {name} is {weight.dtype}; only bf16, fp16, fp32 and fp8 with block "
                    "scales are supported"
                )
            if not bool(torch.isfinite(weight).all()):
                raise DpaError(f"{self.path}: {name} holds NaN or Inf; it cannot be encoded")
            parts.append(weight)
        gate, up, down = parts
        # A checkpoint may mix dtypes; concatenation would refuse.
        return torch.cat((gate.float(), up.float())), down.float()

    def provenance(self) -> dict[str, Any]:
        """What the manifest records of the source: names and sizes, never paths."""
        return {
            "name": self.path.resolve().name,
            "model_type": self.family.model_type,
            "weight_files": {f: (self.path / f).stat().st_size for f in self.files},
        }

    def fingerprint(self) -> dict[str, Any]:
        """What tells this checkpoint from another one: config and the header of every weight file."""
        digests = {}
        for file in self.files:
            with (self.path / file).open("rb") as stream:
                header = stream.read(int.from_bytes(stream.read(8), "little"))
            digests[file] = [(self.path / file).stat().st_size, sha256(header).hexdigest()]
        config = json.dumps(self.config, sort_keys=True).encode()
        return {"config": sha256(config).hexdigest(), "files": digests}

    def index(self) -> dict[str, Any] | None:
        path = self.path / INDEX
        return json.loads(path.read_text()) if path.exists() else None


def layer_number(prefix: str) -> int:
    """Number of the decoder layer that ``prefix`` lies in: 3 for ``model.layers.3.mlp.experts``."""
    return next(int(part) for part in prefix.split(".") if part.isdecimal())
