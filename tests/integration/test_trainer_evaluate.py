"""Evaluations: the same policy gets the same figures, and training does not notice."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from scorekit.server.fake import FakeBackend
from tests.servers import running_service
from tests.trainer_kit import example, letter_tokenizer, tiny_llama
from trainer.config import GenerationConfig, RewardConfig
from trainer.evaluate import evaluate_on_dataset
from trainer.rewards import Rewarder


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XCOMET_URL", raising=False)


def only_metricx(url: str) -> RewardConfig:
    return RewardConfig(metricx_urls=[url], w_xcomet_span=0)


def test_an_evaluation_by_sampling_is_the_same_twice() -> None:
    """And leaves the random state and the model's mode as they were."""
    tokenizer = letter_tokenizer()
    model = tiny_llama(tokenizer).train()
    generation = GenerationConfig(prompt_template="source", max_new_tokens=6, temperature=1.0,
                                  num_samples_per_prompt=1)  # fmt: skip
    examples = [example("ab", str(n)) for n in range(8)]
    texts = []
    with (
        running_service(FakeBackend("metricx")) as url,
        closing(Rewarder(only_metricx(url))) as rewarder,
    ):
        cfg = rewarder.cfg
        for seed in (1, 2):
            torch.manual_seed(seed)
            expected = torch.rand(1)
            torch.manual_seed(seed)
            report = evaluate_on_dataset(examples, model, tokenizer, generation, rewarder, cfg)
            assert torch.equal(torch.rand(1), expected)
            texts.append([line["mt"] for line in report.examples])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1
    assert model.training
    assert report.metricx_coverage == 1.0
    assert report.xcomet_coverage is None and report.xcomet_truncated_frac is None
