"""Answers of vLLM servers: which weights sampled each token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer.rl.config import SamplingConfig
from trainer.rl.engines.vllm_bodies import (
    IDS_ROUTE,
    TEXT_ROUTE,
    Request,
    UnknownWeights,
    VLLMTurn,
    completions,
    request,
    version_label,
)
from trainer.rl.engines.vllm_weights import Weights
from trainer.rl.sampler import CompletionFailed

RUN = "owner-run"


def make_request(has_labels: bool) -> Request:
    gen_cfg = SamplingConfig(max_new_tokens=8, num_samples_per_prompt=1)
    turn = VLLMTurn([1, 2], (), gen_cfg, seed=5, with_logprobs=False, order=0)
    weights = Weights("m", Path("weights"), version_label(RUN, 3), 3)
    return request(turn, weights, has_labels, stops=[0], banned_token_ids=(), image_id=None)


def answer(ids: list[int], *spans: tuple[str, int, int]) -> dict[str, Any]:
    versions = [{"version": label, "start": start, "end": end} for label, start, end in spans]
    choice = {"index": 0, "token_ids": ids, "logprobs": None, "weight_versions": versions}
    return {"choices": [choice]}


def test_tokens_have_the_versions_of_their_spans() -> None:
    spans = [(version_label(RUN, 3), 0, 2), (version_label(RUN, 12), 2, 5)]
    (completion,) = completions(answer([5, 6, 7, 8, 0], *spans), make_request(True), "url")
    assert completion.versions == [3, 3, 12, 12, 12]


def test_without_labels_all_tokens_have_the_version_of_the_request() -> None:
    (completion,) = completions(answer([5, 6]), make_request(False), "url")
    assert completion.versions == [3, 3]
    assert make_request(False).route == TEXT_ROUTE
    assert make_request(True).route == IDS_ROUTE


@pytest.mark.parametrize(
    "label", ["default", "other-run-000003", f"unfinished {RUN}-000003", f"{RUN}-x"]
)
def test_tokens_of_other_weights_are_refused(label: str) -> None:
    spans = [(version_label(RUN, 3), 0, 1), (label, 1, 2)]
    with pytest.raises(UnknownWeights, match="not with this run's"):
        completions(answer([5, 6], *spans), make_request(True), "url")


def test_spans_that_leave_out_a_token_are_refused() -> None:
    with pytest.raises(CompletionFailed, match="1 weight versions for 2 ids"):
        completions(answer([5, 6], (version_label(RUN, 3), 0, 1)), make_request(True), "url")
