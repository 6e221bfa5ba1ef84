# SPDX-License-Identifier: Apache-2.0
"""The streaming writer: whatever the order of the tensors, the safetensors library reads the file
back as it was meant; a file that is not what was declared is an error."""

import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from vllm_dpa.errors import DpaError
from vllm_dpa.safetensors_stream import DTYPE_NAMES, DTYPES, SafetensorsStream, Spec

SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "one": (1,),
    "empty": (0,),
    "empty in the middle": (3, 0, 2),
    "odd": (3, 5, 7),
    "vector": (100,),
}
DTYPE_PARAMS = [pytest.param(dtype, id=name) for dtype, name in DTYPE_NAMES.items()]


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def random_tensor(spec: Spec, generator: torch.Generator) -> Tensor:
    """Random bytes as a tensor (0 and 1 for bool): every bit pattern must survive, NaNs too."""
    dtype, shape = spec
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def raw_bytes(tensor: Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert raw_bytes(found) == raw_bytes(expected)


def specs_of(tensors: dict[str, Tensor]) -> dict[str, Spec]:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def write(path: Path, tensors: dict[str, Tensor], order: list[str]) -> None:
    with SafetensorsStream(path, specs_of(tensors)) as stream:
        for name in order:
            stream.put(name, tensors[name])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", DTYPE_PARAMS)
def test_one_tensor_is_read_back(
    dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator, tmp_path: Path
) -> None:
    path = tmp_path / "one.safetensors"
    tensor = random_tensor((dtype, shape), generator)
    write(path, {"a": tensor}, ["a"])
    with safe_open(path, framework="pt") as file:
        assert list(file.keys()) == ["a"]
        assert_same(file.get_tensor("a"), tensor)


@pytest.mark.parametrize("seed", range(5))
def test_tensors_of_all_types_and_shapes_are_read_back_whatever_their_order(
    seed: int, generator: torch.Generator, tmp_path: Path
) -> None:
    path = tmp_path / "all.safetensors"
    tensors = {
        f"layer.{name}.{shape_name}": random_tensor((dtype, shape), generator)
        for dtype, name in DTYPE_NAMES.items()
        for shape_name, shape in SHAPES.items()
    }
    order = list(tensors)
    random.Random(seed).shuffle(order)
    write(path, tensors, order)
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            assert_same(file.get_tensor(name), tensor)
            part = file.get_slice(name)
            assert DTYPES[part.get_dtype()] == tensor.dtype
            assert tuple(part.get_shape()) == tuple(tensor.shape)


def test_order_of_the_tensors_does_not_change_the_file(
    generator: torch.Generator, tmp_path: Path
) -> None:
    specs: dict[str, Spec] = {
        "a": (torch.uint8, (3,)),
        "b": (torch.float16, (2, 2)),
        "c": (torch.int64, ()),
    }
    tensors = {name: random_tensor(spec, generator) for name, spec in specs.items()}
    write(tmp_path / "forward", tensors, ["a", "b", "c"])
    write(tmp_path / "backward", tensors, ["c", "b", "a"])
    assert (tmp_path / "forward").read_bytes() == (tmp_path / "backward").read_bytes()


@pytest.mark.parametrize("dtype", DTYPE_PARAMS)
def test_data_is_aligned_to_its_element_size(dtype: torch.dtype, tmp_path: Path) -> None:
    path = tmp_path / "aligned"
    # Odd numbers of bytes before and after it, in the order of the names.
    tensors = {
        "a": torch.zeros(3, dtype=torch.uint8),
        "b": torch.ones(5 * dtype.itemsize, dtype=torch.uint8).view(dtype),
        "c": torch.zeros(1, dtype=torch.bool),
    }
    write(path, tensors, ["a", "b", "c"])
    assert path.read_bytes().index(b"\x01" * (5 * dtype.itemsize)) % dtype.itemsize == 0


def test_views_are_written_as_they_look(tmp_path: Path) -> None:
    path = tmp_path / "views"
    base = torch.arange(24, dtype=torch.int32).reshape(4, 6)
    tensors = {
        "transposed": base.T,
        "strided": base[::2, 1::2],
        "expanded": base[:1].expand(3, 6),
        "strided vector": base[1, ::2],
        "from the middle": base[2:],
    }
    write(path, tensors, list(tensors))
    for name, tensor in load_file(path).items():
        assert torch.equal(tensor, tensors[name])


def test_file_without_tensors_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    write(path, {}, [])
    with safe_open(path, framework="pt") as file:
        assert list(file.keys()) == []


def test_metadata_is_kept_beside_the_format(tmp_path: Path) -> None:
    path = tmp_path / "metadata"
    with SafetensorsStream(path, {"a": (torch.uint8, (1,))}, {"maker": "Müller & Söhne"}) as stream:
        stream.put("a", torch.zeros(1, dtype=torch.uint8))
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "maker": "Müller & Söhne"}


def test_old_file_of_that_name_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "again"
    write(path, {"a": torch.ones(1000)}, ["a"])
    write(path, {"b": torch.zeros(2)}, ["b"])
    assert {name: t.tolist() for name, t in load_file(path).items()} == {"b": [0, 0]}


# --- refusals ---


def test_missing_tensors_are_an_error_at_the_end_and_the_first_is_named(tmp_path: Path) -> None:
    specs: dict[str, Spec] = dict.fromkeys(("c", "b", "a"), (torch.uint8, (1,)))
    with (
        pytest.raises(DpaError, match=r"short\.safetensors: 2 declared tensors .* first is b"),
        SafetensorsStream(tmp_path / "short.safetensors", specs) as stream,
    ):
        stream.put("a", torch.zeros(1, dtype=torch.uint8))


def test_error_in_the_body_is_not_hidden_by_missing_tensors(tmp_path: Path) -> None:
    specs: dict[str, Spec] = {"a": (torch.uint8, (1,))}
    with (
        pytest.raises(RuntimeError, match="disk on fire"),
        SafetensorsStream(tmp_path / "a", specs),
    ):
        raise RuntimeError("disk on fire")


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.zeros(2, 3, dtype=torch.float32), id="wider type"),
        pytest.param(torch.zeros(2, 3, dtype=torch.bfloat16), id="type of equal width"),
        pytest.param(torch.zeros(3, 2, dtype=torch.float16), id="transposed"),
        pytest.param(torch.zeros(6, dtype=torch.float16), id="flat"),
        pytest.param(torch.zeros(1, 2, 3, dtype=torch.float16), id="one dimension more"),
        pytest.param(torch.zeros((), dtype=torch.float16), id="scalar"),
        pytest.param(torch.zeros(2, 0, dtype=torch.float16), id="empty"),
    ],
)
def test_tensor_that_is_not_as_declared_is_an_error(tensor: Tensor, tmp_path: Path) -> None:
    specs: dict[str, Spec] = {"weight": (torch.float16, (2, 3))}
    with (
        pytest.raises(DpaError, match=r"tensor weight was declared as torch\.float16 \(2, 3\)"),
        SafetensorsStream(tmp_path / "a", specs) as stream,
    ):
        stream.put("weight", tensor)
