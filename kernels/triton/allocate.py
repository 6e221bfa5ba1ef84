# SPDX-License-Identifier: Apache-2.0
"""The chunk allocator on the GPU. Budget, number of active experts and k stay on the device.

An allocation hands out B chunks over the active experts of a dispatch, or over the experts of one token,
at least 2 each. By default it takes the B largest marginal gains (gate energy x gain on the hull of the
cost table), which is optimal for a convex table; a threshold on their bit patterns, found bit by bit,
selects them without sorting. Ties go to the lower expert id, then to the lower chunk. Where a table is
not convex, chunks that gain nothing by themselves are handed on afterwards (:func:`repaired`). The exact
knapsack by dynamic programming is :func:`allocate_exactly`.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..budget import Budget
from ..hull import is_convex, marginal_gains
from ..planes import MIN_CHUNKS

_CHUNK = 1024
_REPAIR_ROUNDS = 6


@triton.jit
def energies_of(gates, token_weights, pair, mask, TOP_K: tl.constexpr, GATES: tl.constexpr,
                WEIGHTED: tl.constexpr):  # fmt: skip
    """Gate energies float32 of pairs: token weight x gate**2, a negative gate counting as 0."""
    energy = mask.to(tl.float32)
    if GATES:
        gate = tl.load(gates + pair, mask=mask, other=0.0).to(tl.float32)
        gate = tl.maximum(gate, 0.0)
        energy = gate * gate
    if WEIGHTED:
        energy *= tl.load(token_weights + pair // TOP_K, mask=mask, other=0.0)
    return energy


@triton.jit
def nearest_even(value):
    """A float64 >= 0 as int32, halves to even."""
    whole = value.to(tl.int32)
    rest = value - whole.to(tl.float64)
    up = (rest > 0.5) | ((rest == 0.5) & (whole % 2 == 1))
    return whole + up.to(tl.int32)


@triton.jit
def spare_chunks(active, k_bar, MOST: tl.constexpr):
    """Chunks beyond the minimum: B - 2 n with B = clamp(rint(n k_bar), 2 n, MOST n)."""
    n = tl.sum(active.to(tl.int32), 0)
    wanted = nearest_even(n.to(tl.float64) * k_bar.to(tl.float64))
    return tl.minimum(tl.maximum(wanted - 2 * n, 0), (MOST - 2) * n)


@triton.jit
def threshold_of(key, spare):
    """The largest T >= 0 with at least ``spare`` keys >= T (keys int32 [n, 8], -1 for none)."""
    best = 0
    for i in tl.static_range(16):
        # two bits a round: the counts of the candidates do not wait for each other
        base = best
        for q in tl.static_range(1, 4):
            if i > 0 or q == 1:  # bit 31 is the sign
                candidate = base | (q << (30 - 2 * i))
                enough = tl.sum(tl.sum((key >= candidate).to(tl.int32), 1), 0) >= spare
                best = tl.where(enough, candidate, best)
    return best


@triton.jit
def gain_keys(gains, expert, energy, active, floor, MOST: tl.constexpr):
    """Bit patterns of the gains of chunks 3 .. MOST, int32 [n, 8]: floats >= 0 sort as integers.
    Those below a floor are infinite, since they are given in any case."""
    t = tl.arange(0, 8)[None, :]
    usable = active[:, None] & (t < MOST - 2)
    gain = tl.load(gains + expert[:, None] * 8 + t, mask=usable, other=0.0) * energy[:, None]
    gain = tl.where(t < floor[:, None] - 2, float("inf"), gain)
    return tl.where(usable, gain.to(tl.int32, bitcast=True), -1)


@triton.jit
def load_floors(floors, expert, active, FLOORS: tl.constexpr):
    """Smallest k of each expert, int32; 2 where there are no floors."""
    least = expert * 0 + 2
    if FLOORS:
        least = tl.maximum(tl.load(floors + expert, mask=active, other=2).to(tl.int32), 2)
    return least


@triton.jit
def repaired(
    extra, table, expert, energy, active, floor, spare, MOST: tl.constexpr, N: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """Chunks beyond 2 for a table that is not convex: the hull's choice may end inside a segment, where
    a chunk gains nothing. Every expert falls back to its smallest k of the same or less cost; then the
    moves that save most within what is left are made, one a round. Spends at most what it was given."""
    t = tl.arange(0, 8)[None, :]
    usable = active[:, None] & (t < MOST - 1) & (t >= floor[:, None] - 2)
    row = table + expert[:, None] * (MOST + 1) + 2 + t
    cost = tl.load(row, mask=usable, other=0.0) * energy[:, None]
    cost = tl.where(usable, cost, float("inf"))
    reached = tl.min(tl.where(t <= extra[:, None], cost, float("inf")), 1)
    extra = tl.where(active, tl.min(tl.where(cost <= reached[:, None], t, 7), 1), 0)
    move = tl.arange(0, N * 8)
    item = tl.arange(0, N)
    for _ in range(ROUNDS):
        left = spare - tl.sum(extra, 0)
        now = tl.sum(tl.where(t == extra[:, None], tl.where(usable, cost, 0.0), 0.0), 1)
        step = t - extra[:, None]
        saved = tl.where(usable & (step > 0) & (step <= left), now[:, None] - cost, 0.0)
        flat = tl.reshape(saved, (N * 8,))
        most = tl.max(flat, 0)
        first = tl.min(tl.where(flat == most, move, N * 8), 0)
        first = tl.where(most > 0, first, N * 8)
        extra = tl.where(item == first // 8, first % 8, extra)
    return extra


@triton.jit
def allocate_pairs(
    ids, gates, token_weights, floors, gains, table, k_bar, out, first, n, N: tl.constexpr,
    MERGE: tl.constexpr, TOP_K: tl.constexpr, MOST: tl.constexpr, UNIFORM: tl.constexpr,
    GATES: tl.constexpr, WEIGHTED: tl.constexpr, FLOORS: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Allocate over pairs first .. first + n: their experts, if MERGE (pairs of one expert count as one
    and get the same k), or the pairs themselves. Writes int32 k, 0 at padding, to out[first ..]."""
    i = tl.arange(0, N)
    pair = first + i
    expert = tl.load(ids + pair, mask=i < n, other=-1).to(tl.int32)
    real = expert >= 0
    expert = tl.where(real, expert, 0)
    energy = energies_of(gates, token_weights, pair, real, TOP_K, GATES, WEIGHTED)
    active = real
    same = (expert[:, None] == expert[None, :]) & real[:, None] & real[None, :]
    if MERGE:
        each = tl.where(same, energy[None, :].to(tl.float64), 0.0)
        energy = tl.sum(each, 1).to(tl.float32)
        active = real & (tl.min(tl.where(same, i[None, :], N), 1) == i)
    floor = load_floors(floors, expert, active, FLOORS)
    if UNIFORM:
        k = tl.minimum(tl.maximum(nearest_even(tl.load(k_bar).to(tl.float64)), 2), MOST)
        k = tl.where(active, tl.maximum(k + i * 0, floor), 0)
    else:
        spare = spare_chunks(active, tl.load(k_bar), MOST)
        spare = tl.maximum(spare, tl.sum(tl.where(active, floor - 2, 0), 0))
        key = gain_keys(gains, expert, energy, active, floor, MOST)
        threshold = threshold_of(key, spare)
        above = tl.sum((key > threshold).to(tl.int32), 1)
        equal = tl.sum((key == threshold).to(tl.int32), 1)
        lower = expert[None, :] < expert[:, None]
        lower = lower | ((expert[None, :] == expert[:, None]) & (i[None, :] < i[:, None]))
        before = tl.sum(tl.where(lower, equal[None, :], 0), 1)
        rest = spare - tl.sum(above, 0)
        extra = above + tl.minimum(tl.maximum(rest - before, 0), equal)
        if ROUNDS > 0:
            extra = repaired(extra, table, expert, energy, active, floor, spare, MOST, N, ROUNDS)
        k = tl.where(active, extra + 2, 0)
    if MERGE:
        k = tl.sum(tl.where(same & active[None, :], k[None, :], 0), 1)
    tl.store(out + pair, k, mask=i < n)


@triton.jit
def gate_energy(
    ids, gates, token_weights, energy, counts, expert, num_pairs, TOP_K: tl.constexpr,
    GATES: tl.constexpr, WEIGHTED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Float32 energy (summed in float64) and int32 number of an expert's pairs."""
    total = tl.zeros((CHUNK,), tl.float64)
    count = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, num_pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        mine = tl.load(ids + pair, mask=pair < num_pairs, other=-1).to(tl.int32) == expert
        each = energies_of(gates, token_weights, pair, mine, TOP_K, GATES, WEIGHTED)
        total += tl.where(mine, each.to(tl.float64), 0.0)
        count += mine.to(tl.int32)
    tl.store(energy + expert, tl.sum(total, 0).to(tl.float32))
    tl.store(counts + expert, tl.sum(count, 0))


@triton.jit
def gate_energies(
    ids, gates, token_weights, energy, counts, num_pairs, TOP_K: tl.constexpr,
    GATES: tl.constexpr, WEIGHTED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program e: see :func:`gate_energy`."""
    gate_energy(
        ids, gates, token_weights, energy, counts, tl.program_id(0), num_pairs, TOP_K, GATES,
        WEIGHTED, CHUNK,
    )  # fmt: skip


@triton.jit
def allocate_experts(
    energy, counts, floors, gains, table, k_bar, out, experts, N: tl.constexpr,
    MOST: tl.constexpr, UNIFORM: tl.constexpr, FLOORS: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """One program: int32 k of every expert with pairs, 0 for the others."""
    expert = tl.arange(0, N)
    active = tl.load(counts + expert, mask=expert < experts, other=0) > 0
    amount = tl.load(energy + expert, mask=active, other=0.0)
    floor = load_floors(floors, expert, active, FLOORS)
    if UNIFORM:
        k = tl.minimum(tl.maximum(nearest_even(tl.load(k_bar).to(tl.float64)), 2), MOST)
        k = tl.where(active, tl.maximum(k + expert * 0, floor), 0)
    else:
        spare = spare_chunks(active, tl.load(k_bar), MOST)
        spare = tl.maximum(spare, tl.sum(tl.where(active, floor - 2, 0), 0))
        key = gain_keys(gains, expert, amount, active, floor, MOST)
        threshold = threshold_of(key, spare)
        above = tl.sum((key > threshold).to(tl.int32), 1)
        equal = tl.sum((key == threshold).to(tl.int32), 1)
        before = tl.cumsum(equal, 0) - equal
        rest = spare - tl.sum(above, 0)
        extra = above + tl.minimum(tl.maximum(rest - before, 0), equal)
        if ROUNDS > 0:
            extra = repaired(extra, table, expert, amount, active, floor, spare, MOST, N, ROUNDS)
        k = tl.where(active, extra + 2, 0)
    tl.store(out + expert, k, mask=expert < experts)


@triton.jit
def list_items(
    ids, gates, token_weights, energy, counts, item, listed, amount, problem, n,
    PER_TOKEN: tl.constexpr, TOP_K: tl.constexpr, N: tl.constexpr, GATES: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Active items of a problem in the order of expert ids: their number; experts, energies and places
    in ``out`` go to scratch."""
    i = tl.arange(0, N)
    if PER_TOKEN:
        place = problem * TOP_K + i
        expert = tl.load(ids + place, mask=i < n, other=-1).to(tl.int32)
        active = expert >= 0
        each = energies_of(gates, token_weights, place, active, TOP_K, GATES, WEIGHTED)
        lower = expert[None, :] < expert[:, None]
        lower = lower | ((expert[None, :] == expert[:, None]) & (i[None, :] < i[:, None]))
        rank = tl.sum((lower & active[None, :]).to(tl.int32), 1)
    else:
        place = i
        expert = i
        active = tl.load(counts + i, mask=i < n, other=0) > 0
        each = tl.load(energy + i, mask=active, other=0.0)
        rank = tl.cumsum(active.to(tl.int32), 0) - 1
    tl.store(listed + rank, expert, mask=active)
    tl.store(item + rank, place, mask=active)
    tl.store(amount + rank, each, mask=active)
    return active


@triton.jit
def allocate_exactly(
    ids, gates, token_weights, energy, counts, floors, table, k_bar, out, tails, picks, listed, item,
    amount, n, PER_TOKEN: tl.constexpr, TOP_K: tl.constexpr, N: tl.constexpr,
    WIDTH: tl.constexpr, MOST: tl.constexpr, GATES: tl.constexpr, WEIGHTED: tl.constexpr,
    FLOORS: tl.constexpr,
):  # fmt: skip
    """Program p solves problem p exactly, with the arithmetic and tie rule of ``reference.knapsack``.

    A problem is the dispatch (n = E items) or a token (n = TOP_K). ``out`` must be zeros. Scratch per
    problem: float32 tails [2, WIDTH + 8], int8 picks [N, WIDTH], int32 listed and item [N], float32
    amount [N].
    """
    problem = tl.program_id(0).to(tl.int64)
    tails += problem * 2 * (WIDTH + 8)
    picks += problem * N * WIDTH
    listed += problem * N
    item += problem * N
    amount += problem * N
    active = list_items(
        ids, gates, token_weights, energy, counts, item, listed, amount, problem, n, PER_TOKEN,
        TOP_K, N, GATES, WEIGHTED,
    )  # fmt: skip
    number = tl.sum(active.to(tl.int32), 0)
    spare = spare_chunks(active, tl.load(k_bar), MOST)
    b = tl.arange(0, WIDTH)
    # cells left of 0 stand for budgets that cannot be met
    guard = tl.arange(0, 8)
    tl.store(tails + guard, tl.full((8,), float("inf"), tl.float32))
    tl.store(tails + WIDTH + 8 + guard, tl.full((8,), float("inf"), tl.float32))
    tl.store(tails + 8 + b, tl.where(b == 0, 0.0, float("inf")))
    tl.debug_barrier()
    forced = 0
    for i in range(0, number):
        expert = tl.load(listed + i)
        least = 2
        if FLOORS:
            least = tl.maximum(tl.load(floors + expert).to(tl.int32), 2)
        forced += least - 2
    spare = tl.maximum(spare, forced)
    for done in range(0, number):
        i = number - 1 - done
        expert = tl.load(listed + i)
        factor = tl.load(amount + i)
        least = 2
        if FLOORS:
            least = tl.maximum(tl.load(floors + expert).to(tl.int32), 2)
        source = tails + (done % 2) * (WIDTH + 8) + 8
        best = tl.full((WIDTH,), float("inf"), tl.float32)
        pick = tl.zeros((WIDTH,), tl.int32)
        for t in tl.static_range(MOST - 2, -1, -1):
            # one rounding for the product and one for the sum: launched without fused multiply-adds
            cost = factor * tl.load(table + expert * (MOST + 1) + 2 + t)
            cost = tl.where(t + 2 >= least, cost, float("inf"))
            candidate = tl.load(source + b - t) + cost
            better = candidate < best
            best = tl.where(better, candidate, best)
            pick = tl.where(better, t, pick)
        tl.store(tails + ((done + 1) % 2) * (WIDTH + 8) + 8 + b, best)
        tl.store(picks + i * WIDTH + b, pick.to(tl.int8))
        tl.debug_barrier()
    for i in range(0, number):
        given = tl.load(picks + i * WIDTH + spare).to(tl.int32)
        tl.store(out + tl.load(item + i), given + 2)
        spare -= given


@dataclass(frozen=True)
class Tables:
    """What the kernels read of a :class:`Budget`, made once.

    Attributes:
        gains: float32 [E, 8], see :func:`..hull.marginal_gains`.
        rounds: of repair; none for a convex table.
    """

    gains: Tensor
    rounds: int


_tables: "WeakKeyDictionary[Budget, Tables]" = WeakKeyDictionary()


def tables_of(budget: Budget) -> Tables:
    """Tables of a budget. The first call reads the table on the host, so make it before serving.

    Raises:
        ValueError: fewer than 2 resident chunks.
    """
    held = _tables.get(budget)
    if held is None:
        if budget.max_chunks < MIN_CHUNKS:
            raise ValueError(
                f"a table for {budget.max_chunks} chunks; at least {MIN_CHUNKS} are used"
            )
        rounds = 0 if is_convex(budget.table) else _REPAIR_ROUNDS
        held = _tables[budget] = Tables(marginal_gains(budget.table), rounds)
    return held


@dataclass(frozen=True)
class Hints:
    """What requests ask for beyond the budget.

    Attributes:
        token_weights: float32 [T], factor of each token's gate energies.
        floors: int32 [E], the least k of each expert; the budget grows where they need more.
    """

    token_weights: Tensor | None = None
    floors: Tensor | None = None


NO_HINTS = Hints()


def pair_constants(budget: Budget, hints: Hints, top_k: int) -> dict[str, int | bool]:
    """Constants that :func:`allocate_pairs` takes besides N and MERGE."""
    return {
        "TOP_K": top_k,
        "MOST": budget.max_chunks,
        "UNIFORM": budget.rule == "uniform",
        "GATES": budget.use_gates,
        "WEIGHTED": hints.token_weights is not None,
        "FLOORS": hints.floors is not None,
        "ROUNDS": tables_of(budget).rounds,
    }


def pair_tensors(
    gates: Tensor, ids: Tensor, budget: Budget, hints: Hints
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tensors that :func:`allocate_pairs` takes before ``out``."""
    weights = gates if hints.token_weights is None else hints.token_weights
    floors = ids if hints.floors is None else hints.floors
    return ids, gates, weights, floors, tables_of(budget).gains, budget.table, budget.k_bar


@triton.jit
def _allocate_tokens(
    ids, gates, token_weights, floors, gains, table, k_bar, out, N: tl.constexpr,
    TOP_K: tl.constexpr, MOST: tl.constexpr, UNIFORM: tl.constexpr, GATES: tl.constexpr,
    WEIGHTED: tl.constexpr, FLOORS: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Program t: the pairs of token t."""
    allocate_pairs(
        ids, gates, token_weights, floors, gains, table, k_bar, out, tl.program_id(0) * TOP_K,
        TOP_K, N, False, TOP_K, MOST, UNIFORM, GATES, WEIGHTED, FLOORS, ROUNDS,
    )  # fmt: skip


def allocate(
    gates: Tensor,
    topk_ids: Tensor,
    budget: Budget,
    exact: bool = False,
    hints: Hints = NO_HINTS,
) -> Tensor:
    """Chunk counts of one dispatch; see :func:`..reference.allocate`.

    Args:
        gates: [T, K].
        topk_ids: int32 or int64 [T, K], within the table; -1 is padding.
        budget: the layer's cost table and the budget, on the same device.
        exact: solve the knapsack by dynamic programming, instead of by marginal gains: the same k as
            :func:`..reference.allocate` for any table, at ten times the latency.
        hints: of the requests.

    Returns:
        int32 [E] (0 for experts that are not active), or [T, K] if ``per_token`` (0 at padding). Sums
        to the budget; to less only where a table that is not convex has no use for it.
    """
    gates, ids = gates.contiguous(), topk_ids.contiguous()
    if exact and budget.rule != "uniform":
        return _exact(gates, ids, budget, hints)
    if not budget.per_token:
        energy, counts = energies(gates, ids, budget, hints)
        return from_energies(energy, counts, budget, hints)
    tokens, top_k = ids.shape
    out = torch.empty(tokens, top_k, dtype=torch.int32, device=ids.device)
    if tokens:
        _allocate_tokens[(tokens,)](
            *pair_tensors(gates, ids, budget, hints),
            out,
            N=triton.next_power_of_2(top_k),
            **pair_constants(budget, hints, top_k),
            num_warps=1,
        )
    return out


def energies(
    gates: Tensor, ids: Tensor, budget: Budget, hints: Hints = NO_HINTS
) -> tuple[Tensor, Tensor]:
    """Gate energy float32 [E] and number of pairs int32 [E] of every expert."""
    energy = torch.empty(budget.num_experts, dtype=torch.float32, device=ids.device)
    counts = torch.empty(budget.num_experts, dtype=torch.int32, device=ids.device)
    gate_energies[(budget.num_experts,)](
        *(ids, gates, gates if hints.token_weights is None else hints.token_weights),
        *(energy, counts, ids.numel()),
        TOP_K=ids.shape[1],
        GATES=budget.use_gates,
        WEIGHTED=hints.token_weights is not None,
        CHUNK=_CHUNK,
    )
    return energy, counts


def from_energies(
    energy: Tensor, counts: Tensor, budget: Budget, hints: Hints = NO_HINTS
) -> Tensor:
    """int32 k [E] from the outcome of :func:`energies`."""
    experts, tables = budget.num_experts, tables_of(budget)
    out = torch.empty(experts, dtype=torch.int32, device=energy.device)
    allocate_experts[(1,)](
        *(energy, counts, counts if hints.floors is None else hints.floors),
        *(tables.gains, budget.table, budget.k_bar, out, experts),
        N=triton.next_power_of_2(experts),
        MOST=budget.max_chunks,
        UNIFORM=budget.rule == "uniform",
        FLOORS=hints.floors is not None,
        ROUNDS=tables.rounds,
        num_warps=4,
    )
    return out


def _exact(gates: Tensor, ids: Tensor, budget: Budget, hints: Hints) -> Tensor:
    tokens, top_k = ids.shape
    problems, items = (tokens, top_k) if budget.per_token else (1, budget.num_experts)
    n = triton.next_power_of_2(items)
    width = triton.next_power_of_2(items * (budget.max_chunks - MIN_CHUNKS) + 1)

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=ids.device)

    out = torch.zeros(problems, items, dtype=torch.int32, device=ids.device)
    unused = new(0, dtype=torch.float32)
    energy, counts = (unused, unused) if budget.per_token else energies(gates, ids, budget, hints)
    tables_of(budget)  # checks it
    if problems:
        allocate_exactly[(problems,)](
            *(ids, gates, gates if hints.token_weights is None else hints.token_weights),
            *(energy, counts, ids if hints.floors is None else hints.floors),
            *(budget.table, budget.k_bar, out),
            new(problems, 2, width + 8, dtype=torch.float32),
            new(problems, n, width, dtype=torch.int8),
            *(new(problems, n), new(problems, n), new(problems, n, dtype=torch.float32), items),
            PER_TOKEN=budget.per_token,
            TOP_K=top_k,
            N=n,
            WIDTH=width,
            MOST=budget.max_chunks,
            GATES=budget.use_gates,
            WEIGHTED=hints.token_weights is not None,
            FLOORS=hints.floors is not None,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out if budget.per_token else out[0]
