"""Test the full synthesis pipeline with a real vLLM, a real MetricX and a real judge service."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jsonschema
import pytest
import yaml
from pydantic import SecretStr

from demo.madlad_shard import documents, write_shard
from scorekit.errors import UserError
from scorekit.llm import LLMClient, LLMError, Sampling, parse_json
from synth.storage.store import StageFolder
from testing.processes import running_service
from tests.kits.vllm import CONTEXT, KEY, NAME, ROOT, make_model, running_vllm

pytestmark = pytest.mark.vllm

SOURCES, CANDIDATES = 100, 8
MESSAGES = [{"role": "user", "content": "Do you want to delete this message?"}]
VERDICT = {
    "type": "object",
    "properties": {"pass": {"type": "boolean"}, "notes": {"type": "string"}},
    "required": ["pass", "notes"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    with running_vllm(make_model(folder / "model"), folder / "vllm.log") as url:
        yield url


@pytest.fixture(scope="module")
def services(url, tmp_path_factory):
    """Yield the URLs of MetricX and of a judge that uses the same vLLM."""
    folder = tmp_path_factory.mktemp("services")
    upstream = ("--backend", "openai", "--base-url", url, "--model", NAME)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", KEY)
        metricx = running_service("metricx", folder, "--model", str(ROOT / "demo/models/metricx"))
        with metricx as metricx_url, running_service("judge", folder, *upstream) as judge_url:
            yield metricx_url, judge_url


def ask(url, *, model=NAME, key=KEY, messages=MESSAGES, strategy="auto", schema=None, n=1, **more):
    """Return the choices of one request."""
    sampling = Sampling(**{"max_tokens": 48, "seed": 7, **more})

    async def chat():
        secret = SecretStr(key) if key else None
        async with LLMClient(url, model, api_key=secret, strategy=strategy) as client:
            return await client.chat(messages, sampling, n=n, request_id="r", json_schema=schema)

    return asyncio.run(chat())


# -- the server, as our client sees it -------------------------------------------------------------


def test_candidates_of_one_request_and_of_single_calls_are_the_same(url):
    one_request = ask(url, n=CANDIDATES)
    alone = ask(url, n=CANDIDATES, strategy="per_call")
    assert [c.text for c in one_request] == [c.text for c in alone]
    assert len({c.text for c in one_request}) > 1
    assert {c.finish_reason for c in one_request} <= {"stop", "length"}


def test_128_candidates_come_in_the_order_of_their_seeds(url):
    many = ask(url, n=128)
    assert [c.index for c in many] == list(range(128))
    assert [c.text for c in many[:CANDIDATES]] == [c.text for c in ask(url, n=CANDIDATES)]
    assert [c.text for c in ask(url, n=1, seed=7 + 100)] == [many[100].text]


def test_greedy_answers_alike(url):
    assert ask(url, temperature=0.0) == ask(url, temperature=0.0, seed=8)


def test_json_that_is_cut_is_an_error_of_its_own(url):
    (choice,) = ask(url, temperature=0.0, max_tokens=8, schema=VERDICT)
    assert choice.finish_reason == "length" and choice.text.startswith("{")
    with pytest.raises(LLMError) as error:
        parse_json(choice, VERDICT)
    assert error.value.type == "length"


def test_a_wrong_key_and_a_wrong_model_say_what_to_do(url):
    with pytest.raises(UserError, match=r"refused the API key.*--api-key"):
        ask(url, key="wrong")
    with pytest.raises(UserError, match="wants an API key and got none"):
        ask(url, key=None)
    with pytest.raises(UserError, match=f"does not serve a model named 'nope'.*{NAME}"):
        ask(url, model="nope")

    async def check():
        async with LLMClient(url, "nope", api_key=SecretStr(KEY)) as client:
            await client.check()

    with pytest.raises(UserError, match=f"it serves '{NAME}'"):
        asyncio.run(check())


def test_an_overlong_prompt_fails_alone(url):
    with pytest.raises(LLMError) as error:
        ask(url, messages=[{"role": "user", "content": "delete " * CONTEXT}])
    assert error.value.type == "overlong" and not error.value.retryable
    assert str(CONTEXT) in str(error.value)


def test_more_tokens_than_the_model_takes_say_what_to_do(url):
    with pytest.raises(UserError, match=f"max_tokens={CONTEXT + 1}.*--max-model-len"):
        ask(url, max_tokens=CONTEXT + 1)


def test_a_missing_chat_template_says_what_to_do(tmp_path):
    model = make_model(tmp_path / "model", template=False)
    with running_vllm(model, tmp_path / "vllm.log") as url:
        with pytest.raises(UserError, match=r"has no chat template.*--chat-template"):
            ask(url)


# -- the pipeline ----------------------------------------------------------------------------------


def config(folder: Path, url: str, services: tuple[str, str]) -> Path:
    """Write the config: 100 short sources, 8 candidates.

    The policy is a poor teacher, so most rules are off; otherwise too little would reach the
    judge."""
    shard = write_shard(folder / "madlad", documents("en", 0, 120), lang="en")
    path = folder / "config.yaml"
    settings = {
        "run": {"out_dir": str(folder / "run"), "shard_records": 40},
        "data": {
            "files": [str(shard)],
            "src_lang": "eng",
            "tgt_lang": "kor",
            "sample_pool_size": SOURCES,
            "target_examples_total": SOURCES,
        },
        "segmentation": {"max_chars": 160},
        "bucketing": {"boundaries": [0, 8, 12, 16, 24, 40]},
        "teacher": {
            "base_url": url,
            "model": NAME,
            "prompt": "source",
            "generation": {"max_tokens": 96, "max_tokens_blob": 192},
        },
        "prefilter": {"store_texts": True},
        "final_generation": {
            "num_candidates": CANDIDATES,
            "store_top_k": 4,
            "blob": {"blob_ratio": 0.2, "blob_max_tokens": 24},
        },
        "metricx": {"url": services[0], "checkpoint": "metricx"},
        "filters": {
            "rules": {
                "off": [
                    "copied_source",
                    "wrong_script",
                    "wrong_language",
                    "length_ratio",
                    "repetition",
                    "truncated",
                    "numbers_missing",
                    "placeholders",
                    "tag",
                    "too_short",
                ]
            },
            "llm_judge": {"url": services[1], "max_tokens": 24, "fail_policy": "permissive"},
        },
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def synth(path: Path, stage: str, *more: str) -> str:
    """Run `python -m synth run`, which must succeed, and return its output."""
    result = subprocess.run(
        [sys.executable, "-m", "synth", "run", "--config", path, "--stage", stage, *more],
        cwd=ROOT,
        env=os.environ | {"VLLM_API_KEY": KEY},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stderr


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def stage_records(run: Path, stage: str) -> list[dict]:
    return list(StageFolder(run, stage).records())


def candidate_digests(run: Path) -> list[str]:
    """Return digests of the shards with all candidates, which are deleted after scoring."""
    folder = StageFolder(run, "generate_128")
    return [(folder.mark(i) or {})["digest"] for i in range(folder.shards() or 0)]


@pytest.fixture(scope="module")
def run(url, services, tmp_path_factory):
    """Return (config, folder) of the finished run."""
    folder = tmp_path_factory.mktemp("synth")
    path = config(folder, url, services)
    print(synth(path, "all"))
    return path, folder / "run"


def test_pairs_of_100_sources_and_8_candidates_fit_the_schema(run):
    _, folder = run
    pairs = read(folder / "export/train.jsonl")
    schema = json.loads((ROOT / "synth/export/export.schema.json").read_text())
    for pair in pairs:
        jsonschema.validate(pair, schema, cls=jsonschema.Draft202012Validator)
    assert len(pairs) >= SOURCES // 2
    assert {p["pair_id"] for p in pairs} == {"en->ko"}
    assert {p["selection"]["teacher"]["sampling_params"]["final"]["n"] for p in pairs} == {8}


def test_every_source_is_exported_or_rejected_by_reason(run):
    _, folder = run
    assert len(stage_records(folder, "sample_sources")) == SOURCES
    pairs, rejected = read(folder / "export/train.jsonl"), read(folder / "rejected.jsonl")
    rejected = [r for r in rejected if r["stage"] != "sample_sources"]
    assert len(pairs) + len(rejected) == SOURCES
    assert all(r["reason_code"] for r in rejected)
    stats = json.loads((folder / "stats.json").read_text())
    assert stats, "stats.json"


def test_greedy_and_sampled_translations_were_scored(run):
    _, folder = run
    prefilters = [r["prefilter"] for r in stage_records(folder, "prefilter_score")]
    assert all(p["improvement"] == p["score_greedy"] - p["score_sample"] for p in prefilters)
    assert sum(p["greedy"] != p["sample"] for p in prefilters) > len(prefilters) / 2


def test_the_best_candidate_has_the_lowest_score(run):
    _, folder = run
    for record in stage_records(folder, "score_select_best"):
        counts = record["candidate_counts"]
        assert counts["asked"] == CANDIDATES == counts["scored"] + sum(counts["out"].values())
        scores = [c["score"] for c in record["topk"]]
        assert scores == sorted(scores) and all(0 <= s <= 25 for s in scores)


def test_a_judge_that_is_cut_gives_typed_errors_and_permissive_exports_all_the_same(run):
    _, folder = run
    judged = stage_records(folder, "format_filter")
    outcomes = Counter(r["filters"]["judge"].get("error", "verdict") for r in judged)
    assert set(outcomes) == {"model_failure"}, outcomes
    assert len(read(folder / "export/train.jsonl")) == len(judged)


def test_conservative_rejects_what_the_judge_failed_on(run):
    path, folder = run
    records = stage_records(folder, "format_filter")
    out = folder.with_name("conservative")
    subprocess.run(["cp", "-r", folder, out], check=True)
    more = ("--set", f"run.out_dir={out}", "--set", "filters.llm_judge.fail_policy=conservative")
    synth(path, "format_filter", "--overwrite", "--yes", *more)
    synth(path, "export", *more)
    assert read(out / "export/train.jsonl") == []
    rejected = [r for r in read(out / "rejected.jsonl") if r["stage"] == "format_filter"]
    codes = Counter(r["reason_code"] for r in rejected if r["reason_code"].startswith("judge"))
    assert codes == {"judge_error:model_failure": len(records)}


def test_single_calls_give_the_same_pairs_as_n_in_one_request(run):
    path, folder = run
    out = folder.with_name("per_call")
    synth(path, "all", "--set", f"run.out_dir={out}", "--set", "final_generation.strategy=per_call")
    assert candidate_digests(out) == candidate_digests(folder)
    assert read(out / "export/train.jsonl") == read(folder / "export/train.jsonl")
