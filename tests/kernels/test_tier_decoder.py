# SPDX-License-Identifier: Apache-2.0
"""TierDecoder against the reference decode, tier after tier."""

from collections.abc import Callable

import pytest
import torch

from vllm_dpa.kernels import reference
from vllm_dpa.kernels.planes import GEOMETRIC, SCALE_LAYOUTS, PlaneStack
from vllm_dpa.kernels.tier_decoder import TierDecoder

StackFactory = Callable[..., PlaneStack]


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
