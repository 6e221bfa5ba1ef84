# SPDX-License-Identifier: Apache-2.0
"""The CPU fused MoE against the float64 reference, over dtypes, layouts and odd shapes."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vllm_dpa.kernels import dispatch, reference
from vllm_dpa.kernels.cpu.fused_moe import TierDecoder, fused_moe
from vllm_dpa.kernels.planes import GEOMETRIC, PER_CHUNK, SCALE_LAYOUTS, PlaneStack

StackFactory = Callable[..., PlaneStack]

# Relative RMS error against float64. float32 arithmetic throughout; below that, what is left is
# the rounding of the result (2^-9 and 2^-12 at most, relative to each value).
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}
DTYPES = list(TOLERANCE)


def dtype_id(value: object) -> str | None:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


@dataclasses.dataclass(frozen=True)
class Shape:
    """One MoE layer and one batch; the defaults cut no group and no byte."""

    tokens: int = 4
    top_k: int = 2
    experts: int = 5
    hidden: int = 128
    intermediate: int = 64
    group_size: int = 32
    chunks: int = 8


@dataclasses.dataclass
class Batch:
    """Arguments of fused_moe by name."""

    x: Tensor
    w13: PlaneStack
    w2: PlaneStack
    topk_weights: Tensor
    topk_ids: Tensor
    chunk_counts: Tensor

    def arguments(self) -> dict[str, Tensor | PlaneStack]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def relative_error(self) -> float:
        """RMS error of the CPU kernel over the RMS of the reference."""
        out = fused_moe(**self.arguments())
        assert out.dtype == self.x.dtype
        expected = reference.fused_moe(**self.arguments())
        assert out.shape == expected.shape
        return float((out.double() - expected).norm() / expected.norm())


BatchFactory = Callable[..., Batch]


@pytest.fixture
def make_batch(make_stack: StackFactory, generator: torch.Generator) -> BatchFactory:
    """Factory of random batches: distinct experts per token, a random k of 2.. per pair."""

    def make(
        shape: Shape = Shape(),
        dtype: torch.dtype = torch.float32,
        scale_layout: str = PER_CHUNK,
        per_pair: bool = True,
    ) -> Batch:
        common = {
            "experts": shape.experts,
            "group_size": shape.group_size,
            "scale_layout": scale_layout,
            "chunks": shape.chunks,
        }
        pairs = (shape.tokens, shape.top_k)
        ids = torch.rand(shape.tokens, shape.experts, generator=generator).argsort(1)
        counts = pairs if per_pair else (shape.experts,)
        return Batch(
            x=torch.randn(shape.tokens, shape.hidden, generator=generator).to(dtype),
            w13=make_stack(
                rows=2 * shape.intermediate, columns=shape.hidden, row_blocks=2, **common
            ),
            w2=make_stack(rows=shape.hidden, columns=shape.intermediate, **common),
            topk_weights=torch.rand(pairs, generator=generator) + 0.1,
            topk_ids=ids[:, : shape.top_k].contiguous(),
            chunk_counts=torch.randint(
                min(2, shape.chunks), shape.chunks + 1, counts, generator=generator
            ),
        )

    return make


SHAPES = {
    "one token": Shape(tokens=1),
    "one expert": Shape(experts=1, top_k=1),
    "all experts for every token": Shape(experts=3, top_k=3),
    "neither size a multiple of 8": Shape(hidden=100, intermediate=36),
    "sizes below one byte": Shape(hidden=5, intermediate=3),
    "sizes of one": Shape(hidden=1, intermediate=1),
    "last groups of one column": Shape(hidden=65, intermediate=33),
    "group 64, short groups": Shape(hidden=100, intermediate=36, group_size=64),
    "group 128, short groups": Shape(hidden=200, intermediate=132, group_size=128),
    "group 128, whole groups": Shape(hidden=256, intermediate=128, group_size=128),
    "three resident chunks": Shape(chunks=3),
    "one resident chunk": Shape(chunks=1),
    "more tokens than experts": Shape(tokens=33, experts=4),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_agrees_with_the_reference(
    shape: Shape, layout: str, dtype: torch.dtype, make_batch: BatchFactory
) -> None:
    assert make_batch(shape, dtype, layout).relative_error() <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_agrees_with_the_reference_with_one_k_per_expert(
    layout: str, dtype: torch.dtype, make_batch: BatchFactory
) -> None:
    batch = make_batch(Shape(tokens=7), dtype, layout, per_pair=False)
    assert batch.relative_error() <= TOLERANCE[dtype]


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_one_expert_serves_all_tiers_in_one_batch(layout: str, make_batch: BatchFactory) -> None:
    batch = make_batch(Shape(tokens=7, top_k=1, experts=1), scale_layout=layout)
    batch.chunk_counts = torch.tensor([5, 2, 8, 3, 7, 4, 6])[:, None]  # in no order
    assert batch.relative_error() <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("per_pair", [False, True], ids=["k per expert", "k per pair"])
@pytest.mark.parametrize("k", range(1, 9))
def test_agrees_with_the_reference_at_every_uniform_tier(
    k: int, per_pair: bool, make_batch: BatchFactory
) -> None:
    batch = make_batch(Shape(hidden=100, intermediate=36), per_pair=per_pair)
    batch.chunk_counts.fill_(k)
    assert batch.relative_error() <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("per_pair", [False, True], ids=["k per expert", "k per pair"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_no_tokens_give_no_rows(
    dtype: torch.dtype, per_pair: bool, make_batch: BatchFactory
) -> None:
    out = fused_moe(**make_batch(Shape(tokens=0), dtype, per_pair=per_pair).arguments())
    assert out.shape == (0, 128)
    assert out.dtype == dtype


# --- id -1 ---


@pytest.mark.parametrize("per_pair", [False, True], ids=["k per expert", "k per pair"])
def test_slot_with_id_minus_1_contributes_nothing(per_pair: bool, make_batch: BatchFactory) -> None:
    batch = make_batch(per_pair=per_pair)
    batch.topk_ids[1, 0] = -1
    batch.topk_weights[1, 0] = 1e6
    if per_pair:
        batch.chunk_counts[1, 0] = 0  # as the allocator leaves it
    assert batch.relative_error() <= TOLERANCE[torch.float32]


def test_token_with_only_ids_minus_1_gives_zeros(make_batch: BatchFactory) -> None:
    batch = make_batch()
    batch.topk_ids[2], batch.chunk_counts[2] = -1, 0
    batch.x[2] = torch.nan  # padding rows may hold anything
    out = fused_moe(**batch.arguments())
    assert torch.equal(out[2], torch.zeros(128))
    rest = reference.fused_moe(**batch.arguments())
    torch.testing.assert_close(out.double(), rest, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("per_pair", [False, True], ids=["k per expert", "k per pair"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_all_ids_minus_1_give_zeros(
    dtype: torch.dtype, per_pair: bool, make_batch: BatchFactory
) -> None:
    batch = make_batch(dtype=dtype, per_pair=per_pair)
    batch.topk_ids.fill_(-1)
    batch.chunk_counts.fill_(0)
    assert torch.equal(fused_moe(**batch.arguments()), torch.zeros(4, 128, dtype=dtype))


# --- what a token may ask for ---


def test_expert_repeated_in_one_row_counts_twice(make_batch: BatchFactory) -> None:
    batch = make_batch(Shape(top_k=3))
    batch.topk_ids[0] = torch.tensor([4, 1, 4])
    batch.topk_ids[1] = 2  # all slots, at whatever k they drew
    batch.chunk_counts[0] = 5  # the repeated pair is equal in k too
    assert batch.relative_error() <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("gate", [0.0, -0.5])
def test_gate_may_be_zero_or_negative(gate: float, make_batch: BatchFactory) -> None:
    batch = make_batch()
    batch.topk_weights[:, 0] = gate
    assert batch.relative_error() <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=dtype_id)
@pytest.mark.parametrize("per_pair", [False, True], ids=["k per expert", "k per pair"])
def test_ids_and_counts_may_be_of_either_integer_type(
    per_pair: bool, dtype: torch.dtype, make_batch: BatchFactory
) -> None:
    batch = make_batch(per_pair=per_pair)
    batch.topk_ids, batch.chunk_counts = batch.topk_ids.to(dtype), batch.chunk_counts.to(dtype)
    assert batch.relative_error() <= TOLERANCE[torch.float32]


def test_inputs_may_be_strided(make_batch: BatchFactory) -> None:
    batch = make_batch()
    plain = fused_moe(**batch.arguments())
    batch.x = batch.x.T.contiguous().T
    batch.topk_ids = batch.topk_ids.T.contiguous().T
    batch.topk_weights = batch.topk_weights.repeat_interleave(2, 1)[:, ::2]
    batch.chunk_counts = batch.chunk_counts.repeat_interleave(2, 1)[:, ::2]
    torch.testing.assert_close(fused_moe(**batch.arguments()), plain)


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_inputs_are_left_as_they_are(layout: str, make_batch: BatchFactory) -> None:
    batch = make_batch(scale_layout=layout)
    tensors = [batch.x, batch.topk_weights, batch.topk_ids, batch.chunk_counts]
    for stack in (batch.w13, batch.w2):
        tensors += [*stack.planes, *stack.scales, stack.offset, stack.gain]
    before = [tensor.clone() for tensor in tensors]
    fused_moe(**batch.arguments())
    for tensor, copy in zip(tensors, before, strict=True):
        assert torch.equal(tensor.nan_to_num(), copy.nan_to_num())


# --- what must never be read ---


def poison(tensors: list[Tensor], *index: object) -> None:
    for tensor in tensors:
        tensor[index] = torch.nan


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("per_pair", [False, True], ids=["k per expert", "k per pair"])
def test_experts_that_no_token_uses_are_never_read(
    per_pair: bool, layout: str, make_batch: BatchFactory
) -> None:
    batch = make_batch(scale_layout=layout, per_pair=per_pair)
    batch.topk_ids = torch.tensor([[1, 3], [3, -1], [-1, -1], [3, 1]])
    for stack in (batch.w13, batch.w2):
        poison([*stack.scales, stack.offset, stack.gain], [0, 2, 4])
    assert batch.relative_error() <= TOLERANCE[torch.float32]


def test_chunks_beyond_k_are_never_read(make_batch: BatchFactory) -> None:
    batch = make_batch(per_pair=False)
    batch.chunk_counts = torch.tensor([2, 3, 4, 5, 6])
    for stack in (batch.w13, batch.w2):
        for expert, k in enumerate(batch.chunk_counts.tolist()):
            poison(stack.scales[k:], expert)
            other_tiers = [tier for tier in range(9) if tier != k]
            poison([stack.gain], expert, slice(None), other_tiers)
    assert batch.relative_error() <= TOLERANCE[torch.float32]


def test_padding_bits_are_never_used(make_batch: BatchFactory) -> None:
    batch = make_batch(Shape(hidden=100, intermediate=36))
    clean = fused_moe(**batch.arguments())
    for stack in (batch.w13, batch.w2):
        for plane in stack.planes:
            plane[..., -1] |= 0xF0  # 100 and 36 columns both use 4 bits of their last byte
    assert torch.equal(fused_moe(**batch.arguments()), clean)


# --- refusals ---


@pytest.mark.parametrize("per_pair", [False, True], ids=["k per expert", "k per pair"])
@pytest.mark.parametrize("k", [0, 4, 9])
def test_k_that_is_not_resident_is_refused(
    k: int, per_pair: bool, make_batch: BatchFactory
) -> None:
    batch = make_batch(Shape(chunks=3), per_pair=per_pair)
    batch.chunk_counts.view(-1)[int(batch.topk_ids[0, 0]) if not per_pair else 0] = k
    with pytest.raises(ValueError, match=f"k = {k}"):
        fused_moe(**batch.arguments())


def test_k_of_an_expert_that_no_token_uses_is_not_checked(make_batch: BatchFactory) -> None:
    batch = make_batch(Shape(chunks=3), per_pair=False)
    batch.topk_ids = torch.tensor([[0, 1]] * 4)
    batch.chunk_counts = torch.tensor([3, 2, 0, 9, 0])
    assert batch.relative_error() <= TOLERANCE[torch.float32]


def test_dispatch_runs_the_cpu_kernel(make_batch: BatchFactory) -> None:
    batch = make_batch()
    assert torch.equal(dispatch.fused_moe(**batch.arguments()), fused_moe(**batch.arguments()))


def test_dispatch_refuses_a_device_without_a_kernel(make_batch: BatchFactory) -> None:
    batch = make_batch()
    batch.x = batch.x.to("meta")
    with pytest.raises(NotImplementedError, match="'meta'"):
        dispatch.fused_moe(**batch.arguments())


# --- TierDecoder ---


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("columns", [1, 100, 129, 256])
def test_decoder_gives_every_tier_in_turn(
    columns: int, group_size: int, layout: str, make_stack: StackFactory
) -> None:
    stack = make_stack(2, 6, columns, group_size, layout, row_blocks=2)
    decoder = TierDecoder(stack, 1)
    for k in range(1, 9):
        expected = reference.decode(stack, 1, k)
        torch.testing.assert_close(decoder.advance(k).double(), expected, rtol=1e-5, atol=1e-7)


def test_decoder_may_skip_and_repeat_tiers(make_stack: StackFactory) -> None:
    stack = make_stack(scale_layout=GEOMETRIC)
    decoder = TierDecoder(stack, 0)
    for k in (2, 2, 5, 8, 8):
        expected = reference.decode(stack, 0, k)
        torch.testing.assert_close(decoder.advance(k).double(), expected, rtol=1e-5, atol=1e-7)


def test_weights_of_a_tier_stay_as_they_were_when_the_decoder_moves_on(
    make_stack: StackFactory,
) -> None:
    decoder = TierDecoder(make_stack(), 0)
    low = decoder.advance(2)
    copy = low.clone()
    decoder.advance(8)
    assert torch.equal(low, copy)


def test_decoder_refuses_to_go_back(make_stack: StackFactory) -> None:
    decoder = TierDecoder(make_stack(), 0)
    decoder.advance(5)
    with pytest.raises(ValueError, match="tier 4 was asked for after tier 5"):
        decoder.advance(4)
