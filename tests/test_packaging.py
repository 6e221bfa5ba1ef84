# SPDX-License-Identifier: Apache-2.0
"""What is installed and what imports what: wheel, entry points, and packages that stay light."""

import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def python(code: str, *options: str, cwd: Path = ROOT) -> str:
    result = subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, cwd=cwd, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
         "--wheel-dir", str(folder), str(ROOT)],
        check=True,
    )  # fmt: skip
    return next(folder.glob("vllm_dpa-*.whl"))


def test_wheel_has_every_module(wheel: Path) -> None:
    shipped = set(zipfile.ZipFile(wheel).namelist())
    for folder, package in (
        ("vllm_dpa", "vllm_dpa"),
        ("kernels", "vllm_dpa/kernels"),
        ("profiling", "vllm_dpa/profiling"),
    ):
        for path in (ROOT / folder).rglob("*.py"):
            assert f"{package}/{path.relative_to(ROOT / folder)}" in shipped
    assert "vllm_dpa/py.typed" in shipped
    assert "vllm_dpa/kernels/cpu/_native.abi3.so" in shipped
    assert any(name.endswith("licenses/LICENSE") for name in shipped)
    assert not any(name.startswith(("kernels/", "profiling/", "tests/")) for name in shipped)


def test_wheel_imports_from_where_it_is_unpacked(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
        "import vllm_dpa.kernels.dispatch as k, vllm_dpa.profiling.encode as p; "
        "print(k.__file__); print(p.__file__)"
    )
    for path in python(code, cwd=tmp_path).splitlines():
        assert path.startswith(str(tmp_path))


def test_editable_install_maps_the_top_level_folders() -> None:
    code = "import vllm_dpa.kernels as k, vllm_dpa.profiling as p; print(k.__file__, p.__file__)"
    kernels, profiling = python(code).split()
    assert Path(kernels).parent.name == "kernels"
    assert Path(profiling).parent.name == "profiling"


def test_every_entry_point_is_called_dpa_moe() -> None:
    points = distribution("vllm-dpa").entry_points
    ours = [e for e in points if e.group.startswith("vllm.")]
    assert ours
    assert {e.name for e in ours} == {"dpa_moe"}
    assert all(callable(e.load()) for e in ours)


def test_kernels_need_torch_alone_under_any_name() -> None:
    """On a bare GPU machine the folder is used as a top-level package, beside torch and triton."""
    code = (
        "import sys; import kernels.dispatch, kernels.reference; "
        "print([m for m in ('vllm', 'vllm_dpa', 'pydantic', 'transformers', 'safetensors') "
        "if m in sys.modules])"
    )
    assert python(code) == "[]"


@pytest.mark.parametrize(
    "module", ["vllm_dpa.cli", "vllm_dpa.checkpoint", "vllm_dpa.allocation",
               "vllm_dpa.profiling.encode", "vllm_dpa.profiling.evaluate"]
)  # fmt: skip
def test_offline_tools_do_not_import_vllm(module: str) -> None:
    assert python(f"import sys, {module}; print('vllm' in sys.modules)") == "False"


def test_every_source_file_has_its_licence_line() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "*.py", "*.sh", "*.cpp", "*.h", "Makefile", "*.toml"],
        capture_output=True, text=True, cwd=ROOT, check=True,
    ).stdout.split()  # fmt: skip
    assert tracked
    for name in tracked:
        assert "SPDX-License-Identifier: Apache-2.0" in (ROOT / name).read_text()[:200], name
