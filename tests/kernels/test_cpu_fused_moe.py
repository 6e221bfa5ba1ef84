# SPDX-License-Identifier: Apache-2.0
"""The native fused MoE against the float64 reference: every instruction set that this machine has, every
method and precision, over dtypes, layouts and odd shapes."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vllm_dpa.kernels import dispatch, reference
from vllm_dpa.kernels.budget import Budget, Rule
from vllm_dpa.kernels.cpu import native
from vllm_dpa.kernels.cpu.fused_moe import fused_moe, scratch_of_thread
from vllm_dpa.kernels.cpu.packed import PackedLayer
from vllm_dpa.kernels.planes import PER_CHUNK, SCALE_LAYOUTS, PlaneStack

StackFactory = Callable[..., PlaneStack]


@dataclasses.dataclass(frozen=True)
class Variant:
    """One compiled form of the kernel."""

    isa: str
    activations: str
    path: str


# avx2 has no tile; the portable form has nothing else, and 16-bit activations whatever is asked for.
VARIANTS = [
    Variant(isa, activations, path)
    for isa in native.available_isas()
    for activations, path in (("int8", "lut"), ("int16", "lut"), ("int8", "tile"))
    if (isa, path) not in (("portable", "lut"), ("avx2", "tile"))
]
# Relative RMS error of a whole layer against float64: the rounding of activations, measured 1.3 to
# 2.4 % in 8 bits at 2048 x 1024 (small shapes scatter more) and 0.03 % in 16 (portable: up to 0.17 %),
# then that of the result.
TOLERANCE_OF_ACTIVATIONS = {"int8": 4e-2, "int16": 3e-3}
TOLERANCE_OF_DTYPE = {torch.float32: 0.0, torch.bfloat16: 4e-3, torch.float16: 1e-3}
DTYPES = list(TOLERANCE_OF_DTYPE)


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
    """Arguments of the reference by name, and the kernel to compare with it."""

    x: Tensor
    w13: PlaneStack
    w2: PlaneStack
    topk_weights: Tensor
    topk_ids: Tensor
    chunk_counts: Tensor
    variant: Variant

    def reference(self) -> Tensor:
        stacks = (self.w13, self.w2)
        routing = (self.topk_weights, self.topk_ids, self.chunk_counts)
        return reference.fused_moe(self.x, *stacks, *routing)

    def run(self, path: str | None = None) -> Tensor:
        """Output of the kernel, from scratch memory full of NaN."""
        layer = PackedLayer.of_stacks(self.w13, self.w2, self.variant.isa)
        scratch_of_thread(1).fill_(0xFF)
        variant = self.variant
        routing = (self.topk_weights, self.topk_ids, self.chunk_counts)
        return fused_moe(self.x, layer, *routing, variant.activations, path or variant.path)

    def tolerance(self) -> float:
        # Where a sum has only a few terms, they may cancel and leave the rounding alone.
        few = 10 if self.w2.columns < 8 else 1
        rounding = TOLERANCE_OF_ACTIVATIONS[self.variant.activations]
        return few * rounding + TOLERANCE_OF_DTYPE[self.x.dtype]

    def relative_error(self) -> float:
        """RMS error of the CPU kernel over the RMS of the reference."""
        out, expected = self.run(), self.reference()
        assert out.dtype == self.x.dtype
        assert out.shape == expected.shape
        return float((out.double() - expected).norm() / expected.norm())

    def check(self) -> None:
        assert self.relative_error() <= self.tolerance()


BatchFactory = Callable[..., Batch]


@pytest.fixture(params=VARIANTS, ids=lambda v: f"{v.isa}-{v.activations}-{v.path}")
def variant(request: pytest.FixtureRequest) -> Variant:
    return request.param


@pytest.fixture
def make_batch(
    make_stack: StackFactory, generator: torch.Generator, variant: Variant
) -> BatchFactory:
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
            variant=variant,
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
    batch = make_batch(shape, dtype, layout)
    if shape.hidden < 8 and batch.variant.activations == "int8":
        pytest.skip("8 bits of one or two terms that may cancel have no relative error to speak of")
    batch.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_agrees_with_the_reference_with_one_k_per_expert(
    layout: str, dtype: torch.dtype, make_batch: BatchFactory
) -> None:
    batch = make_batch(Shape(tokens=7), dtype, layout, per_pair=False)
    batch.check()


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_one_expert_serves_all_tiers_in_one_batch(layout: str, make_batch: BatchFactory) -> None:
    batch = make_batch(Shape(tokens=7, top_k=1, experts=1), scale_layout=layout)
    batch.chunk_counts = torch.tensor([5, 2, 8, 3, 7, 4, 6])[:, None]  # in no order
    batch.check()


@pytest.mark.parametrize("per_pair", [False, True], ids=["k per expert", "k per pair"])
@pytest.mark.parametrize("k", range(1, 9))
def test_agrees_with_the_reference_at_every_uniform_tier(
    k: int, per_pair: bool, make_batch: BatchFactory
) -> None:
    batch = make_batch(Shape(hidden=100, intermediate=36), per_pair=per_pair)
    batch.chunk_counts.fill_(k)
    batch.check()


@pytest.mark.parametrize("per_pair", [False, True], ids=["k per expert", "k per pair"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_no_tokens_give_no_rows(
    dtype: torch.dtype, per_pair: bool, make_batch: BatchFactory
) -> None:
    out = make_batch(Shape(tokens=0), dtype, per_pair=per_pair).run()
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
    batch.check()


def test_token_with_only_ids_minus_1_gives_zeros(make_batch: BatchFactory) -> None:
    batch = make_batch()
    batch.topk_ids[2], batch.chunk_counts[2] = -1, 0
    batch.x[2] = torch.nan  # padding rows may hold anything
    out = batch.run()
    assert torch.equal(out[2], torch.zeros(128))
    batch.check()


@pytest.mark.parametrize("per_pair", [False, True], ids=["k per expert", "k per pair"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_all_ids_minus_1_give_zeros(
    dtype: torch.dtype, per_pair: bool, make_batch: BatchFactory
) -> None:
    batch = make_batch(dtype=dtype, per_pair=per_pair)
    batch.topk_ids.fill_(-1)
    batch.chunk_counts.fill_(0)
    assert torch.equal(batch.run(), torch.zeros(4, 128, dtype=dtype))


# --- what a token may ask for ---


def test_expert_repeated_in_one_row_counts_twice(make_batch: BatchFactory) -> None:
    batch = make_batch(Shape(top_k=3))
    batch.topk_ids[0] = torch.tensor([4, 1, 4])
    batch.topk_ids[1] = 2  # all slots, at whatever k they drew
    batch.chunk_counts[0] = 5  # the repeated pair is equal in k too
    batch.check()


@pytest.mark.parametrize("gate", [0.0, -0.5])
def test_gate_may_be_zero_or_negative(gate: float, make_batch: BatchFactory) -> None:
    batch = make_batch()
    batch.topk_weights[:, 0] = gate
    batch.check()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=dtype_id)
@pytest.mark.parametrize("per_pair", [False, True], ids=["k per expert", "k per pair"])
def test_ids_and_counts_may_be_of_either_integer_type(
    per_pair: bool, dtype: torch.dtype, make_batch: BatchFactory
) -> None:
    batch = make_batch(per_pair=per_pair)
    batch.topk_ids, batch.chunk_counts = batch.topk_ids.to(dtype), batch.chunk_counts.to(dtype)
    batch.check()


def test_inputs_may_be_strided(make_batch: BatchFactory) -> None:
    batch = make_batch()
    plain = batch.run()
    batch.x = batch.x.T.contiguous().T
    batch.topk_ids = batch.topk_ids.T.contiguous().T
    batch.topk_weights = batch.topk_weights.repeat_interleave(2, 1)[:, ::2]
    batch.chunk_counts = batch.chunk_counts.repeat_interleave(2, 1)[:, ::2]
    torch.testing.assert_close(batch.run(), plain)


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_inputs_are_left_as_they_are(layout: str, make_batch: BatchFactory) -> None:
    batch = make_batch(scale_layout=layout)
    tensors = [batch.x, batch.topk_weights, batch.topk_ids, batch.chunk_counts]
    for stack in (batch.w13, batch.w2):
        tensors += [*stack.planes, *stack.scales, stack.offset, stack.gain]
    before = [tensor.clone() for tensor in tensors]
    batch.run()
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
    batch.check()


def test_chunks_beyond_k_are_never_read(make_batch: BatchFactory) -> None:
    batch = make_batch(per_pair=False)
    batch.chunk_counts = torch.tensor([2, 3, 4, 5, 6])
    for stack in (batch.w13, batch.w2):
        for expert, k in enumerate(batch.chunk_counts.tolist()):
            poison(stack.scales[k:], expert)
            other_tiers = [tier for tier in range(9) if tier != k]
            poison([stack.gain], expert, slice(None), other_tiers)
    batch.check()


def test_padding_bits_are_never_used(make_batch: BatchFactory) -> None:
    batch = make_batch(Shape(hidden=100, intermediate=36))
    clean = batch.run()
    for stack in (batch.w13, batch.w2):
        for plane in stack.planes:
            plane[..., -1] |= 0xF0  # 100 and 36 columns both use 4 bits of their last byte
    assert torch.equal(batch.run(), clean)


# --- refusals ---


@pytest.mark.parametrize("per_pair", [False, True], ids=["k per expert", "k per pair"])
@pytest.mark.parametrize("k", [0, 4, 9])
def test_k_that_is_not_resident_is_refused(
    k: int, per_pair: bool, make_batch: BatchFactory
) -> None:
    batch = make_batch(Shape(chunks=3), per_pair=per_pair)
    batch.chunk_counts.view(-1)[int(batch.topk_ids[0, 0]) if not per_pair else 0] = k
    with pytest.raises(ValueError, match=r"a k outside the resident chunks 1\.\.3"):
        batch.run()


def test_k_of_an_expert_that_no_token_uses_is_not_checked(make_batch: BatchFactory) -> None:
    batch = make_batch(Shape(chunks=3), per_pair=False)
    batch.topk_ids = torch.tensor([[0, 1]] * 4)
    batch.chunk_counts = torch.tensor([3, 2, 0, 9, 0])
    batch.check()


def test_expert_past_the_last_is_refused(make_batch: BatchFactory) -> None:
    batch = make_batch()
    batch.topk_ids[2, 1] = 5
    with pytest.raises(ValueError, match="expert id 5 with 5 experts"):
        batch.run()


@pytest.mark.parametrize("field", ["x", "topk_weights", "topk_ids", "chunk_counts"])
def test_shapes_that_do_not_fit_are_refused(field: str, make_batch: BatchFactory) -> None:
    batch = make_batch()
    setattr(batch, field, getattr(batch, field)[:, :1])
    with pytest.raises(ValueError, match=r"must be|do not fit"):
        batch.run()


def test_dispatch_refuses_a_device_without_a_kernel(make_batch: BatchFactory) -> None:
    batch = make_batch()
    layer = PackedLayer.of_stacks(batch.w13, batch.w2)
    with pytest.raises(NotImplementedError, match="'meta'"):
        dispatch.fused_moe(
            batch.x.to("meta"), layer, batch.topk_weights, batch.topk_ids, batch.chunk_counts
        )


# --- batches ---


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_token_is_bitwise_the_same_alone_and_in_any_batch(
    dtype: torch.dtype, layout: str, make_batch: BatchFactory
) -> None:
    batch = make_batch(Shape(tokens=23, hidden=200, intermediate=70), dtype, layout)
    together = batch.run()
    assert torch.equal(together, batch.run())
    rows = (batch.x, batch.topk_weights, batch.topk_ids, batch.chunk_counts)
    for t in range(23):
        batch.x, batch.topk_weights, batch.topk_ids, batch.chunk_counts = (
            r[t : t + 1] for r in rows
        )
        assert torch.equal(batch.run()[0], together[t])


def test_more_tokens_than_one_pass(make_batch: BatchFactory) -> None:
    batch = make_batch(Shape(tokens=1100, top_k=1, experts=2, hidden=33, intermediate=20))
    whole = batch.run()
    rows = (batch.x, batch.topk_weights, batch.topk_ids, batch.chunk_counts)
    batch.x, batch.topk_weights, batch.topk_ids, batch.chunk_counts = (r[1000:] for r in rows)
    assert torch.equal(whole[1000:], batch.run())


def test_default_dtype_of_torch_changes_nothing(make_batch: BatchFactory) -> None:
    """vLLM builds models, and with them the packed experts, under a default dtype of bf16."""
    batch = make_batch()
    plain = batch.run()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(batch.run(), plain)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_number_of_threads_changes_nothing(threads: int, make_batch: BatchFactory) -> None:
    batch = make_batch(Shape(tokens=9, hidden=300, intermediate=100))
    alone = batch.run()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(batch.run(), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_bad_value_stays_with_its_token(value: float, make_batch: BatchFactory) -> None:
    batch = make_batch(Shape(tokens=6))
    clean = batch.run()
    batch.x[3, 17] = value
    out = batch.run()
    others = [0, 1, 2, 4, 5]
    assert torch.equal(out[others], clean[others])
    assert not bool(torch.isfinite(out[3]).all())


@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e-6, 1e4])
def test_inputs_of_any_size(scale: float, make_batch: BatchFactory) -> None:
    batch = make_batch()
    batch.x *= scale
    if batch.reference().norm() > 1e-30:
        batch.check()
    else:
        assert float(batch.run().norm()) <= 1e-30


@pytest.mark.parametrize("per_token", [False, True], ids=["dispatch", "token"])
@pytest.mark.parametrize("rule", ["knapsack", "uniform"])
@pytest.mark.parametrize("tokens", [0, 1, 7, 600])
def test_a_budget_is_allocated_in_the_same_call(
    tokens: int, rule: Rule, per_token: bool, make_stack: StackFactory, generator: torch.Generator
) -> None:
    w13 = make_stack(experts=4, rows=64, columns=64)
    w2 = make_stack(experts=4, rows=64, columns=32)
    layer = PackedLayer.of_stacks(w13, w2)
    x = torch.randn(tokens, 64, generator=generator)
    ids = torch.rand(tokens, 4, generator=generator).argsort(1)[:, :3]
    ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
    gates = torch.rand(ids.shape, generator=generator)
    table = torch.rand(4, 9, generator=generator).sort(1, descending=True).values
    budget = Budget(table, torch.tensor([3.4]), per_token, rule)
    counts = native.allocate(gates, ids, budget)
    scratch_of_thread(1).fill_(0xFF)
    out = fused_moe(x, layer, gates, ids, budget)
    assert torch.equal(out, fused_moe(x, layer, gates, ids, counts))


def test_budgets_that_do_not_fit_the_layer_are_refused(make_stack: StackFactory) -> None:
    w13 = make_stack(experts=2, rows=64, columns=64, chunks=4)
    w2 = make_stack(experts=2, rows=64, columns=32, chunks=4)
    layer = PackedLayer.of_stacks(w13, w2)
    x, gates, ids = torch.zeros(1, 64), torch.ones(1, 2), torch.tensor([[0, 1]])
    for experts, chunks in ((3, 4), (2, 5)):
        budget = Budget(torch.ones(experts, chunks + 1), torch.tensor([4.0]), per_token=False)
        with pytest.raises(ValueError, match="does not fit a layer of 2 experts with 4"):
            fused_moe(x, layer, gates, ids, budget)
