# SPDX-License-Identifier: Apache-2.0
"""Models, texts and encoded checkpoints shared by all tests; each is made once per session."""

import interpret_triton  # noqa: F401

# isort: split
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from vllm_dpa.checkpoint import CheckpointReader
from vllm_dpa.profiling.calibration import Calibration, CalibrationOptions, read_documents
from vllm_dpa.profiling.encode import encode
from vllm_dpa.profiling.layer_fit import EncodeOptions
from vllm_dpa.profiling.reference_model import ReferenceModel
from vllm_dpa.profiling.residuals import ProfileOptions, profile
from vllm_dpa.profiling.source import SourceCheckpoint

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
BUNDLED = ROOT / "examples/tiny-moe"

TINY_QWEN = "tiny-qwen2moe"
TINY_OLMOE = "tiny-olmoe"


def model_path(name: str) -> Path:
    """Folder of a trained model; skips the test where it is not on this machine."""
    if name == TINY_QWEN:
        return BUNDLED
    path = SHARED / "models" / name
    if not path.is_dir():
        pytest.skip(f"{name} is not here: it lives in ../shared/models, beside the repository")
    return path


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tests of tiny tensors: threads that wait for each other on busy cores cost 20 times more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def find_model() -> Callable[[str], Path]:
    return model_path


@pytest.fixture(scope="session")
def calibration_text() -> Path:
    return BUNDLED / "text/calibration.txt"


@pytest.fixture(scope="session")
def heldout_text() -> Path:
    return BUNDLED / "text/heldout.txt"


@pytest.fixture(scope="session")
def load_reference() -> Callable[[str], ReferenceModel]:
    """Loads a trained model in float32, once."""
    loaded: dict[str, ReferenceModel] = {}

    def load(name: str) -> ReferenceModel:
        if name not in loaded:
            loaded[name] = ReferenceModel.load(model_path(name))
        return loaded[name]

    return load


@pytest.fixture(scope="session")
def encoded(
    tmp_path_factory: pytest.TempPathFactory, calibration_text: Path
) -> Callable[..., Path]:
    """Encodes and profiles a trained model, once per setting. Copy before changing anything."""
    folder = tmp_path_factory.mktemp("encoded")
    made: dict[tuple[str, EncodeOptions], Path] = {}

    def make(name: str, options: EncodeOptions | None = None) -> Path:
        options = options or EncodeOptions()
        if (name, options) not in made:
            out = folder / f"{name}-{len(made)}"
            encode(model_path(name), out, options)
            reader = CheckpointReader(out)
            source = SourceCheckpoint(model_path(name))
            inputs = Calibration(
                source,
                read_documents(str(calibration_text)),
                CalibrationOptions(max_tokens=8192),
                torch.device("cpu"),
            )
            table, record = profile(reader, source, inputs, ProfileOptions())
            reader.write_residuals(table, record)
            made[name, options] = out
        return made[name, options]

    return make


@pytest.fixture
def qwen_copy(encoded: Callable[..., Path], tmp_path: Path) -> Path:
    """A private copy of the encoded bundled model, free to be damaged."""
    return Path(shutil.copytree(encoded(TINY_QWEN), tmp_path / "checkpoint"))
