"""Check how ids are chosen: exactly the inverse of the cumulative distribution."""

from __future__ import annotations

import math
import random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from trainer.rl.engines.continuous import TokenChooser, TokenStream, invert_cumulative

#: The largest number that a stream can give.
LAST = 1 - 2**-53
#: Sums of these are exact.
EIGHTHS = [0.125, 0.25, 0.0, 0.5, 0.125, 0.0]


def chooser(top_p: float = 1.0, top_k: int = 0, banned: tuple[int, ...] = ()) -> TokenChooser:
    return TokenChooser(top_p, top_k, banned)


def choices(weights: list[float], uniforms: list[float], **settings: Any) -> list[int]:
    """Return what is chosen from one distribution by each of these numbers."""
    logits = torch.tensor([weights] * len(uniforms)).log()
    return chooser(**settings).choose(logits, uniforms, [1.0] * len(uniforms))[0].tolist()


def test_an_id_has_the_interval_of_its_probability() -> None:
    count = 64
    ids = choices(EIGHTHS, [(i + 0.5) / count for i in range(count)])
    assert ids == sorted(ids)
    assert [ids.count(i) / count for i in range(len(EIGHTHS))] == EIGHTHS


def test_a_number_at_the_end_of_an_interval_belongs_to_the_next_one() -> None:
    ids, _ = chooser().choose(torch.zeros(4, 4).double(), [0.0, 0.25, 0.5, 0.75], [1.0] * 4)
    assert ids.tolist() == [0, 1, 2, 3]


def test_an_id_of_probability_0_is_never_chosen() -> None:
    ends = [0.0, LAST]
    assert choices(EIGHTHS, ends) == [0, 4]
    assert choices([0.0, 0.0, 0.3, 0.7, 0.0], ends) == [2, 3]
    assert choices([0.5, 0.2, 0.3, 0.0], [0.0, 0.6, LAST], banned=(0, 2)) == [1, 1, 1]
    for size in (3, 10, 1000, 5000):  # sums that round up and down
        numbers = torch.Generator().manual_seed(size)
        weights = torch.rand(size, generator=numbers)
        weights[: size // 3] = 0
        weights[-size // 3 :] = 0
        positive = weights.nonzero().flatten().tolist()
        assert choices(weights.tolist(), ends) == [positive[0], positive[-1]]


def test_sums_that_do_not_increase_give_no_impossible_id() -> None:
    """Check a rounding that only parallel sums have."""
    weights = torch.tensor([[0.25, 0.0, 0.75, 0.0]] * 3)

    def rounded(tensor: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        return torch.tensor([[0.25, 0.3, 0.9, 1.0]] * 3, dtype=torch.float64)

    with patch.object(Tensor, "cumsum", rounded):
        ids = invert_cumulative(weights, torch.tensor([0.1, 0.27, LAST]).double())
    assert ids.tolist() == [0, 2, 2]


def test_top_k_and_top_p_cut_the_distribution_and_its_log_probabilities() -> None:
    weights = [0.1, 0.2, 0.3, 0.4]
    grid = [i / 50 for i in range(50)]
    assert {*choices(weights, grid, top_k=1)} == {3}
    assert {*choices(weights, grid, top_k=2)} == {2, 3}
    assert {*choices(weights, grid, top_k=9)} == {0, 1, 2, 3}
    assert {*choices(weights, grid, top_p=0.35)} == {3}
    assert {*choices(weights, grid, top_p=0.6)} == {2, 3}
    assert {*choices(weights, grid, top_p=1e-9)} == {3}
    assert {*choices(weights, grid, top_k=3, top_p=0.7)} == {2, 3}  # of 0.2, 0.3, 0.4
    assert {*choices(weights, grid, top_k=2, banned=(3,))} == {1, 2}
    logits = torch.tensor([weights]).double().log()
    ids, logprobs = chooser(top_k=2).choose(logits, [0.99], [1.0])
    assert ids.tolist() == [3]
    assert logprobs.tolist() == pytest.approx([math.log(4 / 7)])


def test_each_row_has_its_temperature() -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0, 2.0]] * 3).double()
    ids, logprobs = chooser().choose(logits, [0.01] * 3, [1.0, 0.0, 4.0])
    assert ids.tolist() == [0, 2, 0]
    for row, temperature in ((0, 1.0), (2, 4.0)):
        weights = [math.exp(logit / temperature) for logit in (0, 1, 3, 2)]
        assert logprobs[row].item() == pytest.approx(math.log(weights[0] / sum(weights)))
    ids, _ = chooser(banned=(2,)).choose(logits, [0.0] * 3, [0.0] * 3)
    assert ids.tolist() == [3] * 3


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_are_refused(bad: float) -> None:
    logits = torch.tensor([[0.0, 1.0], [bad, 0.0]])
    with pytest.raises(ValueError, match="logits: not finite"):
        chooser().choose(logits, [0.5, 0.5], [1.0, 1.0])


def test_half_precision_is_summed_in_float64() -> None:
    """Check that rare ids after a likely one have their shares: float32 sums have steps of 6e-8."""
    likely, rare = 1.0, math.exp(-20)  # 2e-9
    logits = torch.tensor([[0.0] + [-20.0] * 1000] * 3, dtype=torch.bfloat16)
    expected = [1, 500, 1000]
    total = likely + 1000 * rare
    uniforms = [(likely + (i - 0.5) * rare) / total for i in expected]
    ids, logprobs = chooser().choose(logits, uniforms, [1.0] * 3)
    # The rounding of the float32 normalizer is common to all ids
    assert ids.tolist() == expected
    assert logprobs.dtype == torch.float32


def test_a_stream_is_a_function_of_its_seed() -> None:
    def numbers(seed: int) -> list[float]:
        stream = TokenStream(seed, 1.0)
        return [stream.next_uniform() for _ in range(4)]

    first = numbers(5)
    torch.manual_seed(0)
    assert numbers(5) == first != numbers(6)
    generator = random.Random(5)
    assert first == [generator.random() for _ in range(4)]


def test_streams_of_seeds_that_differ_in_high_bits_alone_differ() -> None:
    streams = [TokenStream(5 + high * 2**32, 1.0) for high in range(3)]
    assert len({stream.next_uniform() for stream in streams}) == 3
