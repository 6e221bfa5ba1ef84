# SPDX-License-Identifier: Apache-2.0
"""The Triton fused MoE in the interpreter against the float64 reference: every mode over dtypes, group
sizes and odd shapes. Shapes are tiny: one tile takes the interpreter 0.1 s."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
import triton
from torch import Tensor

from vllm_dpa.kernels import reference
from vllm_dpa.kernels.budget import Budget, Rule
from vllm_dpa.kernels.planes import GEOMETRIC, PER_CHUNK, PlaneStack
from vllm_dpa.kernels.triton import allocate as allocation
from vllm_dpa.kernels.triton.fused_moe import DIRECT_TOKENS, fused_moe
from vllm_dpa.kernels.triton.layout import MatrixShape, PackedLayer, PackedMatrix
from vllm_dpa.kernels.triton.tuning import TILES, Config, Mode, choose

StackFactory = Callable[..., PlaneStack]

# Relative RMS error of a whole layer against float64. ``sep`` and ``shared`` keep weights exact: what is
# rounded is the 16-bit intermediate and the result. ``deq`` rounds weights to 16 bits, several times.
TOLERANCE = {
    ("sep", torch.bfloat16): 4e-3,
    ("sep", torch.float16): 6e-4,
    ("shared", torch.bfloat16): 4e-3,
    ("shared", torch.float16): 6e-4,
    ("deq", torch.bfloat16): 1.2e-2,
    ("deq", torch.float16): 1.6e-3,
}
MODES: list[Mode] = ["sep", "deq", "shared"]
DTYPES = [torch.bfloat16, torch.float16]

every_mode = pytest.mark.parametrize("mode", MODES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


@dataclasses.dataclass(frozen=True)
class Shape:
    """One MoE layer and one batch; one tile of columns each."""

    tokens: int = 5
    top_k: int = 1
    experts: int = 2
    hidden: int = 100
    intermediate: int = 36
    group_size: int = 64
    chunks: int = 8
    per_pair: bool = False
    split: int = 1


@dataclasses.dataclass
class Batch:
    """Arguments of the reference, and how the kernel runs."""

    x: Tensor
    w13: PlaneStack
    w2: PlaneStack
    topk_weights: Tensor
    topk_ids: Tensor
    chunk_counts: Tensor
    config: Config

    @property
    def layer(self) -> PackedLayer:
        return PackedLayer.of_stacks(self.w13, self.w2, "cpu")

    def run(self) -> Tensor:
        routing = (self.topk_weights, self.topk_ids, self.chunk_counts)
        return fused_moe(self.x, self.layer, *routing, self.config)

    def check(self) -> None:
        routing = (self.topk_weights, self.topk_ids, self.chunk_counts)
        expected = reference.fused_moe(self.x, self.w13, self.w2, *routing)
        out = self.run()
        assert out.dtype == self.x.dtype
        assert out.shape == expected.shape
        error = float((out.double() - expected).norm() / expected.norm())
        # where a sum has only a few terms, they may cancel and leave the rounding alone
        few = 10 if self.w2.columns < 8 else 1
        assert error <= few * TOLERANCE[self.config.mode, self.x.dtype]


BatchFactory = Callable[..., Batch]


@pytest.fixture
def make_batch(make_stack: StackFactory, generator: torch.Generator) -> BatchFactory:
    """Factory of random batches: distinct experts per token, a random k of 2.. per pair."""

    def make(mode: Mode, shape: Shape = Shape(), dtype: torch.dtype = torch.bfloat16) -> Batch:
        common = {
            "experts": shape.experts,
            "group_size": shape.group_size,
            "scale_layout": GEOMETRIC if mode == "shared" else PER_CHUNK,
            "chunks": shape.chunks,
        }
        pairs = (shape.tokens, shape.top_k)
        counts = pairs if shape.per_pair else (shape.experts,)
        ids = torch.rand(shape.tokens, shape.experts, generator=generator).argsort(1)
        return Batch(
            x=torch.randn(shape.tokens, shape.hidden, generator=generator).to(dtype),
            w13=make_stack(
                rows=2 * shape.intermediate, columns=shape.hidden, row_blocks=2, **common
            ),
            w2=make_stack(rows=shape.hidden, columns=shape.intermediate, **common),
            topk_weights=torch.rand(pairs, generator=generator) + 0.1,
            topk_ids=ids[:, : shape.top_k],
            chunk_counts=torch.randint(
                min(2, shape.chunks), shape.chunks + 1, counts, generator=generator
            ),
            config=Config.of_tile(mode, min(TILES[mode]), shape.split),
        )

    return make


SHAPES = {
    "one token": Shape(tokens=1, top_k=2),
    "most tokens without sorting": Shape(tokens=DIRECT_TOKENS),
    "one expert": Shape(tokens=DIRECT_TOKENS + 1, experts=1),
    "k per pair": Shape(tokens=5, experts=1, per_pair=True),
    "last groups of one column": Shape(tokens=1, hidden=129, intermediate=65),
    "several tiles": Shape(tokens=1, hidden=272, intermediate=192, group_size=128),
    "columns in two parts": Shape(intermediate=256, experts=1, split=2),
    "sizes of one": Shape(hidden=1, intermediate=1, tokens=1, group_size=32),
    "three resident chunks": Shape(chunks=3),
    "one resident chunk": Shape(chunks=1, tokens=1),
}


@every_mode
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_agrees_with_the_reference(mode: Mode, shape: Shape, make_batch: BatchFactory) -> None:
    make_batch(mode, shape).check()


@every_mode
@every_dtype
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_every_dtype_and_group_size(
    group_size: int, dtype: torch.dtype, mode: Mode, make_batch: BatchFactory
) -> None:
    batch = make_batch(mode, Shape(tokens=2, group_size=group_size, per_pair=True), dtype)
    batch.chunk_counts = torch.tensor([[7], [3]])
    batch.check()


@every_mode
def test_one_expert_serves_all_tiers_in_one_batch(mode: Mode, make_batch: BatchFactory) -> None:
    batch = make_batch(mode, Shape(tokens=8, experts=1, per_pair=True, group_size=128))
    batch.chunk_counts = torch.tensor([5, 2, 8, 3, 1, 7, 4, 6])[:, None]  # in no order
    batch.check()


@pytest.mark.parametrize(("mode", "block_m"), [("sep", 16), ("deq", 64), ("shared", 32)])
def test_larger_blocks(mode: Mode, block_m: int, make_batch: BatchFactory) -> None:
    batch = make_batch(mode, Shape(tokens=block_m + 1, experts=1))
    batch.config = Config.of_tile(mode, block_m)
    batch.check()


@pytest.mark.parametrize("mode", ["sep", "deq"])
def test_two_planes_per_step(mode: Mode, make_batch: BatchFactory) -> None:
    batch = make_batch(mode, Shape(tokens=1))
    batch.config = dataclasses.replace(batch.config, planes=2)
    batch.check()


# --- what a batch may hold ---


@pytest.mark.parametrize("tokens", [3, 6], ids=["direct", "sorted"])
def test_id_minus_1_contributes_nothing(tokens: int, make_batch: BatchFactory) -> None:
    batch = make_batch("shared", Shape(tokens=tokens, top_k=2, per_pair=True))
    batch.topk_ids[1, 0] = -1
    batch.topk_weights[1, 0] = 1e6
    batch.chunk_counts[1, 0] = 0  # as the allocator leaves it
    batch.topk_ids[2], batch.chunk_counts[2] = -1, 0
    batch.x[2] = torch.nan  # padding rows may hold anything
    assert torch.equal(batch.run()[2], torch.zeros(100))
    batch.check()


@pytest.mark.parametrize("tokens", [3, 6], ids=["direct", "sorted"])
@pytest.mark.parametrize("per_pair", [False, True], ids=["k per expert", "k per pair"])
def test_all_ids_minus_1_give_zeros(per_pair: bool, tokens: int, make_batch: BatchFactory) -> None:
    batch = make_batch("shared", Shape(tokens=tokens, per_pair=per_pair))
    batch.topk_ids.fill_(-1)
    assert not bool(batch.run().any())


def test_no_tokens_give_no_rows(make_batch: BatchFactory) -> None:
    out = make_batch("shared", Shape(tokens=0)).run()
    assert out.shape == (0, 100)
    assert out.dtype == torch.bfloat16


def test_integers_of_either_type_and_strides(make_batch: BatchFactory) -> None:
    batch = make_batch("shared", Shape(tokens=5, top_k=2, per_pair=True))
    batch.chunk_counts.fill_(3)
    plain = batch.run()
    batch.x = batch.x.T.contiguous().T
    batch.topk_weights = batch.topk_weights.repeat_interleave(2, 1)[:, ::2]
    batch.topk_ids = batch.topk_ids.int()
    batch.chunk_counts = batch.chunk_counts.int().T.contiguous().T
    assert torch.equal(batch.run(), plain)


def test_bad_value_stays_with_its_token(make_batch: BatchFactory) -> None:
    batch = make_batch("sep", Shape(tokens=6))
    clean = batch.run()
    batch.x[3, 17] = torch.inf
    out = batch.run()
    others = [0, 1, 2, 4, 5]
    assert torch.equal(out[others], clean[others])
    assert not bool(torch.isfinite(out[3]).all())


@pytest.mark.parametrize("mode", ["sep", "shared"])
def test_token_is_bitwise_the_same_alone_and_in_any_batch(
    mode: Mode, make_batch: BatchFactory
) -> None:
    batch = make_batch(mode, Shape(tokens=11))
    together = batch.run()
    rows = (batch.x, batch.topk_weights, batch.topk_ids)
    for t in (0, 10):
        batch.x, batch.topk_weights, batch.topk_ids = (r[t : t + 1] for r in rows)
        assert torch.equal(batch.run()[0], together[t])


def test_chunks_beyond_k_and_unused_experts_are_never_read(make_batch: BatchFactory) -> None:
    batch = make_batch("sep", Shape(experts=3))
    batch.topk_ids = torch.tensor([[0], [2], [-1], [2], [0]])
    batch.chunk_counts = torch.tensor([3, 5, 6])
    for stack in (batch.w13, batch.w2):
        for tensor in (*stack.scales, stack.offset, stack.gain):
            tensor[1] = torch.nan
        for expert, k in ((0, 3), (2, 6)):
            for scale in stack.scales[k:]:
                scale[expert] = torch.nan
            stack.gain[expert, :, [tier for tier in range(9) if tier != k]] = torch.nan
    batch.check()


# --- addresses ---


def far_apart(tensor: Tensor, dim: int) -> Tensor:
    """A copy of int32 [2 or more, ..] whose second element along ``dim`` lies beyond 2**31 words."""
    step = 2**31 + 16
    strides = list(tensor.stride())
    strides[dim] = step
    memory = torch.empty(step * (tensor.shape[dim] - 1) + tensor.numel(), dtype=tensor.dtype)
    view = memory.as_strided(tensor.shape, strides)
    view.copy_(tensor)
    return view


@pytest.mark.parametrize("dim", [0, 1], ids=["plane", "expert"])
def test_planes_beyond_2_to_the_31_words(dim: int, make_batch: BatchFactory) -> None:
    batch = make_batch("shared", Shape(tokens=1, experts=2, chunks=2))
    layer, expected = batch.layer, batch.run()
    layer.w2.planes = far_apart(layer.w2.planes, dim)  # virtual memory: only what is used is there
    routing = (batch.topk_weights, batch.topk_ids, batch.chunk_counts)
    assert torch.equal(fused_moe(batch.x, layer, *routing, batch.config), expected)


# --- budgets ---


@pytest.mark.parametrize("per_token", [False, True], ids=["dispatch", "token"])
@pytest.mark.parametrize(
    ("tokens", "rule"), [(1, "uniform"), (3, "knapsack"), (5, "knapsack"), (5, "uniform")]
)
def test_a_budget_is_allocated_on_the_way(
    tokens: int, rule: Rule, per_token: bool, make_batch: BatchFactory, generator: torch.Generator
) -> None:
    batch = make_batch("shared", Shape(tokens=tokens, top_k=2, experts=3))
    batch.topk_ids[torch.rand(batch.topk_ids.shape, generator=generator) < 0.15] = -1
    table = torch.rand(3, 1, generator=generator) * 4.0 ** -torch.arange(9)
    budget = Budget(table, torch.tensor([3.4]), per_token, rule)
    gates, ids = batch.topk_weights, batch.topk_ids
    out = fused_moe(batch.x, batch.layer, gates, ids, budget, batch.config)
    batch.chunk_counts = reference.allocate(gates, ids, budget)
    assert torch.equal(out, batch.run())


KERNELS = {
    # tokens, scope: kernels from the routed tokens to the layer's output
    (1, False): ["prepare", "expert_gemm", "expert_gemm", "combine"],
    (1, True): ["prepare", "expert_gemm", "expert_gemm", "combine"],
    (32, False): [
        *("prepare", "allocate_experts", "sort_pairs"),
        *("expert_gemm", "expert_gemm", "combine"),
    ],
    (32, True): [
        *("prepare", "count_pairs", "sort_pairs"),
        *("expert_gemm", "expert_gemm", "combine"),
    ],
}


@pytest.mark.parametrize(("tokens", "per_token"), KERNELS.keys())
@pytest.mark.parametrize("layout", [PER_CHUNK, GEOMETRIC])
def test_nothing_waits_for_the_device(
    layout: str, tokens: int, per_token: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On meta tensors whatever needs a value on the host raises."""
    launched: list[str] = []

    def record(kernel: object, *args: object, **kwargs: object) -> None:
        launched.append(kernel.fn.__name__)  # type: ignore[attr-defined]

    monkeypatch.setattr(type(allocation.allocate_experts), "run", record)
    layer = PackedLayer(
        PackedMatrix(MatrixShape(64, 512, 256, 128, layout, gated=True), 8, "meta"),
        PackedMatrix(MatrixShape(64, 256, 256, 128, layout, gated=False), 8, "meta"),
    )
    x = torch.empty(tokens, 256, dtype=torch.bfloat16, device="meta")
    gates = torch.empty(tokens, 8, device="meta")
    ids = torch.empty(tokens, 8, dtype=torch.int32, device="meta")
    table, k_bar = torch.empty(64, 9, device="meta"), torch.empty(1, device="meta")
    budget = Budget(table, k_bar, per_token)
    # made when a layer is loaded, on the host
    tables = allocation.Tables(torch.empty(64, 8, device="meta"), rounds=0)
    monkeypatch.setitem(allocation._tables, budget, tables)
    out = fused_moe(x, layer, gates, ids, budget)
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    assert launched == KERNELS[tokens, per_token]


def test_the_test_for_waiting_can_fail() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        torch.empty(1, device="meta").item()


# --- choices ---


def test_configuration_follows_tokens_per_expert(make_stack: StackFactory) -> None:
    common = {"experts": 2, "group_size": 32}
    for layout, expected in (
        (PER_CHUNK, {1: ("sep", 8), 16: ("sep", 16), 17: ("deq", 32), 40: ("deq", 64)}),
        (GEOMETRIC, {1: ("shared", 8), 32: ("shared", 32), 500: ("shared", 32)}),
    ):
        w13 = make_stack(rows=8, columns=8, scale_layout=layout, row_blocks=2, **common)
        w2 = make_stack(rows=8, columns=4, scale_layout=layout, **common)
        layer = PackedLayer.of_stacks(w13, w2, "cpu")
        for tokens, (mode, block_m) in expected.items():
            config = choose(layer, tokens, 2, torch.bfloat16)
            assert (config.mode, config.block_m) == (mode, block_m)


def test_weights_too_large_for_fp16_stay_in_mode_sep(make_stack: StackFactory) -> None:
    w13 = make_stack(experts=2, rows=8, columns=8, row_blocks=2)
    w2 = make_stack(experts=2, rows=8, columns=4)
    w2.offset[0, 0, 0] = 3.0
    layer = PackedLayer.of_stacks(w13, w2, "cpu")
    assert layer.largest_weight >= 3.0
    assert choose(layer, 100, 2, torch.float16).mode == "sep"
    assert choose(layer, 100, 2, torch.bfloat16).mode == "deq"


# --- refusals ---


@pytest.mark.parametrize("field", ["x", "topk_weights", "topk_ids", "chunk_counts"])
def test_shapes_that_do_not_fit_are_refused(field: str, make_batch: BatchFactory) -> None:
    batch = make_batch("shared", Shape(top_k=2))
    setattr(batch, field, getattr(batch, field)[..., :1])
    with pytest.raises(ValueError, match=r"must be|do not fit"):
        batch.run()


def test_float32_activations_are_refused(make_batch: BatchFactory) -> None:
    batch = make_batch("shared")
    batch.x = batch.x.float()
    with pytest.raises(ValueError, match="bfloat16 or float16"):
        batch.run()


def test_budgets_that_do_not_fit_the_layer_are_refused(make_batch: BatchFactory) -> None:
    batch = make_batch("shared", Shape(chunks=4, experts=3))
    for experts, chunks in ((4, 4), (3, 5)):
        budget = Budget(torch.ones(experts, chunks + 1), torch.tensor([4.0]), per_token=False)
        with pytest.raises(ValueError, match="does not fit a layer of 3 experts with 4"):
            fused_moe(batch.x, batch.layer, batch.topk_weights, batch.topk_ids, budget)


def test_kernels_are_interpreted_here() -> None:
    assert not isinstance(allocation.allocate_experts, triton.JITFunction)
