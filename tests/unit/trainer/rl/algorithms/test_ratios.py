"""Compare importance weights with closed forms, with the code of TRL, and with what they were."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.kits.float64 import CLOSE
from trainer.rl.algorithms import ALGORITHMS
from trainer.rl.algorithms.algorithm import ImportanceCorrection, ImportanceMode
from trainer.rl.config import RLConfig

MODES: tuple[ImportanceMode, ...] = (
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
)
#: Tokens that were sampled: in several turns with observations between them, with padding, all of
#: the row, and none of it.
SAMPLED = torch.tensor(
    [
        [1, 1, 0, 0, 1, 1, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 0],
    ]
).bool()
#: The tokens to train on: the last sampled one of a row is not.
TRAINED = SAMPLED.clone()
TRAINED[2, 6] = False


def logprobs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return [5, 7] log-probabilities of the trainer and of the sampler, NaN where none was
    sampled. Token ratios reach from 0.2 to 5."""
    generator = torch.Generator().manual_seed(3)
    old = -3 * torch.rand(SAMPLED.shape, generator=generator, dtype=dtype)
    sampler = old + 3.2 * (torch.rand(SAMPLED.shape, generator=generator, dtype=dtype) - 0.5)
    nan = float("nan")
    return old.masked_fill(~SAMPLED, nan), sampler.masked_fill(~SAMPLED, nan)


def bounded(ratio: float, mode: ImportanceMode, floor: float, cap: float) -> float:
    if mode.endswith("truncate"):
        return min(ratio, cap)
    return ratio if floor <= ratio <= cap else 0.0


@pytest.mark.parametrize(
    ("algorithm", "mode"),
    [
        *((algorithm, mode) for algorithm in ("ppo", "reinforce") for mode in MODES),
        *(("gspo", mode) for mode in MODES[2:]),
    ],
)
def test_weights_in_closed_form(algorithm: str, mode: ImportanceMode) -> None:
    """Check each token of rows with several turns, padding, and an untrained last token: the
    product is over what was sampled, GSPO's geometric mean over what is trained on."""
    old, sampler = logprobs()
    correction = ImportanceCorrection(mode, cap=1.8, floor=0.4)
    weights = ALGORITHMS[algorithm].importance_weights(old, sampler, TRAINED, SAMPLED, correction)
    expected_values = set()
    for row in range(len(SAMPLED)):
        differences = [
            (old[row, column] - sampler[row, column]).item() if SAMPLED[row, column] else 0.0
            for column in range(SAMPLED.shape[1])
        ]
        trained = [d for d, on in zip(differences, TRAINED[row], strict=True) if on]
        sequence = sum(differences)
        if algorithm == "gspo":
            sequence = sum(trained) / len(trained) if trained else 0.0
        for column in SAMPLED[row].nonzero().flatten().tolist():
            log_ratio = differences[column] if mode.startswith("token") else sequence
            expected = bounded(math.exp(log_ratio), mode, 0.4, 1.8)
            assert weights[row, column].item() == pytest.approx(expected, abs=CLOSE)
            expected_values.add(expected)
    bound = 0.0 if mode.endswith("mask") else 1.8
    assert bound in expected_values and len(expected_values) > 2


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce", "gspo"])
def test_the_defaults_give_the_bits_of_truncated_importance_sampling(algorithm: str) -> None:
    """Check float32: the same operations in the same order as before there were modes."""
    old, sampler = (values.nan_to_num(-1.0) for values in logprobs(torch.float32))
    cfg = RLConfig.model_validate({"algorithm": algorithm})
    weights = cfg.chosen_algorithm.importance_weights(
        old, sampler, TRAINED, SAMPLED, cfg.correction
    )
    expected = (old - sampler).clamp(-20.0, 20.0).exp().clamp(max=2.0)
    if algorithm == "gspo":
        sums = (old - sampler).masked_fill(~TRAINED, 0.0).sum(-1, keepdim=True)
        means = sums / TRAINED.sum(-1, keepdim=True).clamp(min=1)
        expected = means.clamp(-20.0, 20.0).exp().clamp(max=2.0).expand(TRAINED.shape)
    assert weights.dtype == torch.float32
    assert torch.equal(weights, expected)


@pytest.mark.parametrize("mode", ["token_mask", "sequence_mask"])
def test_a_ratio_on_a_border_is_kept(mode: ImportanceMode) -> None:
    log_ratio = torch.tensor([-0.5, 0.0, 0.7], dtype=torch.float64)
    floor, fresh, cap = log_ratio.exp().tolist()
    for low, high, expected in (
        (floor, cap, [floor, 1.0, cap]),
        (math.nextafter(floor, 1), math.nextafter(cap, 1), [0.0, 1.0, 0.0]),
        (fresh, fresh, [0.0, 1.0, 0.0]),
        (0.0, 1.0, [floor, 1.0, 0.0]),
    ):
        weights = ImportanceCorrection(mode, high, low).weights(log_ratio)
        assert weights.tolist() == expected


@pytest.mark.parametrize("extreme", [30.0, 1e4, math.inf])
def test_extreme_ratios_are_bounded_and_a_clamp_does_not_hide_them(extreme: float) -> None:
    """Check a clamp that alone would move every ratio into the range."""
    log_ratio = torch.tensor([extreme, -extreme, 0.0])
    for limit in (20.0, 0.5):
        masked = ImportanceCorrection("token_mask", 2.0, 0.5, limit).weights(log_ratio)
        assert masked.tolist() == [0.0, 0.0, 1.0]
        truncated = ImportanceCorrection("token_truncate", 2.0, 0.5, limit).weights(log_ratio)
        expected = [min(2.0, math.exp(limit)), math.exp(-limit), 1.0]
        assert truncated.tolist() == pytest.approx(expected)


def test_a_long_sequence_has_a_finite_product() -> None:
    old, sampler = torch.zeros(2, 5000), torch.tensor([[-1.0], [1.0]]).expand(2, 5000)
    mask = torch.ones(2, 5000).bool()
    for mode, expected in (("sequence_truncate", [2.0, math.exp(-20)]), ("sequence_mask", [0, 0])):
        correction = ImportanceCorrection(mode, 2.0, 0.5)  # type: ignore[arg-type]
        weights = ALGORITHMS["ppo"].importance_weights(old, sampler, mask, mask, correction)
        assert weights[:, 0].tolist() == pytest.approx(expected)
        assert torch.equal(weights, weights[:, :1].expand(2, 5000))


@pytest.mark.parametrize("mode", MODES)
def test_no_gradient_flows_through_the_weights(mode: ImportanceMode) -> None:
    old, sampler = (values.nan_to_num().requires_grad_() for values in logprobs())
    correction = ImportanceCorrection(mode, 2.0, 0.5)
    for algorithm in ALGORITHMS.values():
        weights = algorithm.importance_weights(old, sampler, TRAINED, SAMPLED, correction)
        assert not weights.requires_grad


def trl_weights(
    mode: ImportanceMode, old: Tensor, sampler: Tensor, cap: float, floor: float
) -> Tensor:
    """Return the ratios of TRL's GRPOTrainer, by the statements of its own code.

    It has no function for them: they are a part of the method that samples.
    """
    trl = pytest.importorskip("trl")
    method = trl.GRPOTrainer._generate_and_score_completions
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    name = "vllm_importance_sampling_ratio"
    assignments = (f"{name} = torch.exp(logps_diff)", f"{name} = torch.clamp")
    blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and all(text in ast.unparse(node) for text in assignments)
    ]
    block = min(blocks, key=lambda node: len(ast.unparse(node)))
    settings = {"mode": mode, "clip_max": cap, "clip_min": floor, "correction": True}
    trainer = {f"vllm_importance_sampling_{key}": value for key, value in settings.items()}
    variables = {
        "torch": torch,
        "math": math,
        "self": SimpleNamespace(use_vllm=True, **trainer),
        "old_per_token_logps": old,
        "sampling_per_token_logps": sampler,
        "completion_mask": torch.ones_like(old),
        "tool_mask": SAMPLED.long(),
    }
    exec(compile(ast.Module(block.body, []), "trl", "exec"), variables)
    return variables[name]


@pytest.mark.parametrize("mode", MODES)
def test_weights_are_those_of_trl(mode: ImportanceMode) -> None:
    """Check all modes with a token's ratio and the product; TRL truncates from below as well where
    it has a lower bound."""
    old, sampler = logprobs()
    floor = 0.4 if mode.endswith("mask") else 0.0
    expected = trl_weights(mode, old.nan_to_num(), sampler.nan_to_num(), 1.8, floor)
    expected = expected.expand(SAMPLED.shape)[SAMPLED]
    correction = ImportanceCorrection(mode, 1.8, floor)
    for name in ("ppo", "reinforce"):
        weights = ALGORITHMS[name].importance_weights(old, sampler, TRAINED, SAMPLED, correction)
        torch.testing.assert_close(weights[SAMPLED], expected, atol=CLOSE, rtol=0)
    assert len(expected.unique()) > 2
