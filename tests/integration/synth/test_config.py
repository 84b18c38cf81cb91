"""Check that every key of configs/synth/seed.yaml changes the pipeline's behavior."""

from __future__ import annotations

import asyncio
import copy
import json
import os
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
import structlog
import yaml

from demo.madlad_shard import documents, write_shard
from scorekit.config import load_config
from scorekit.errors import ScorekitError, UserError
from scorekit.server.fake import FakeBackend
from synth.config import SynthConfig, answers_place
from synth.execution.services import open_clients
from synth.record import RejectedRecord, source_id
from synth.run import RunOptions, run_stages
from synth.sources.madlad import hub_pattern
from synth.stages.format_filter import FormatFilter
from synth.stages.generate_128 import Generate128
from synth.stages.prefilter_score import PrefilterScore
from synth.stages.sample_sources import SampleSources
from synth.stages.score_select_best import ScoreSelectBest
from synth.stages.select_sources import choose, write_entries
from synth.storage.stats import StageStats
from synth.storage.store import StageFolder
from testing.judge import running_judge
from testing.openai_server import FakeOpenAI
from testing.servers import free_port, running_service, wait_until
from tests.kits.synth.driver import prepared

SEED = Path(__file__).parents[3] / "configs/synth/seed.yaml"
SOURCE = "이것은 번역할 한국어 문장입니다. 두 번째 문장도 있습니다."


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Write shards in the form of MADLAD-400: Korean clean and noisy, English clean."""
    root = tmp_path_factory.mktemp("madlad")
    write_shard(root, documents("ko", 0, 30), lang="ko")
    write_shard(root, [*documents("ko", 30, 30), "짧다\n" * 8], lang="ko", split="noisy")
    write_shard(root, documents("en", 60, 30), lang="en")
    return str(root / "data/*/*.jsonl.gz")


@pytest.fixture(scope="module")
def servers():
    """Return (teacher, its URL, MetricX's URL, the judge's URL)."""
    teacher, metricx = (
        FakeOpenAI("qwen", respond=lambda body, seed: f"A text {seed}"),
        FakeBackend(),
    )
    with (
        teacher.running() as url,
        running_service(metricx) as metricx_url,
        running_judge(max_input_length=60) as judge_url,
    ):
        yield teacher, url, metricx_url, judge_url


@pytest.fixture
def base(tmp_path, corpus, servers):
    """Return the seed's config with small test servers and values for fast tests."""
    _, url, metricx_url, judge_url = servers
    data = yaml.safe_load(SEED.read_text(encoding="utf-8"))
    data["run"]["out_dir"] = str(tmp_path / "run")
    data["data"] |= {"files": [corpus], "sample_pool_size": 40, "target_examples_total": 3}
    data["teacher"] |= {"base_url": url, "model": "qwen", "wait_for_server_s": 0}
    data["teacher"]["retry"] = {"max_attempts": 2, "backoff_s": [0.01]}
    data["metricx"] |= {
        "url": metricx_url,
        "checkpoint": "fake-metricx",
        "device": None,
        "cache_db": None,
        "batch_size": 64,
    }
    data["filters"]["llm_judge"] |= {"url": judge_url, "model": None}
    data["final_generation"]["num_candidates"] = 8
    return data


# -- what a config leads to ------------------------------------------------------------------------


def the_sample(cfg, servers):
    """Return the sources that the first stage samples, with the settings that it records."""
    stage = SampleSources()
    manifest, work = prepared(stage, cfg)
    stage.run(work, manifest)
    assert (cfg.run.out_dir / "sampled_sources.parquet").exists()
    records = list(work.folder.records())
    return [(r["source_text"], r["source_type"], r["length_bucket_id"]) for r in records]


def the_hub(cfg, servers):
    return hub_pattern(cfg.data)


def the_selection(cfg, servers):
    path = cfg.run.out_dir / "entries"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_entries(
        path,
        (
            {"source_id": f"{i:02}", "length_bucket_id": 0, "prefilter": {"improvement": float(i)}}
            for i in range(20)
        ),
    )
    return len(choose(path, cfg).positions)


def call_services(cfg, servers, work, uses=frozenset({"teacher", "metricx", "judge"})):
    """Return the result of `work(clients)` with the config's services, or the error message."""

    folder = StageFolder(cfg.run.out_dir, "asked")
    folder.clear()  # each config starts a new stage
    Path(answers_place(cfg)).unlink(missing_ok=True)

    async def run():
        async with open_clients(cfg, uses, folder, StageStats()) as clients:
            return await work(clients)

    servers[0].well()
    servers[0].forget()
    try:
        return asyncio.run(run())
    except ScorekitError as error:
        return f"{type(error).__name__}: {error}"


def record(**more):
    return {"source_id": source_id(SOURCE), "source_text": SOURCE, "source_type": "sentence"} | more


def the_requests(cfg, servers):
    """Return the teacher's request bodies and headers from prefilter and final generation."""

    async def work(clients):
        await PrefilterScore().process(record(), clients)
        await Generate128().process(record(), clients)
        servers[0].fail(500, times=1)  # for the next request, to measure its retry delay
        await clients.translate(record(source_text="또"), temperature=0.0, n=1, seed=1)

    error = call_services(cfg, servers, work)
    if error is not None:
        return error
    requests = sorted(servers[0].requests, key=lambda r: json.dumps(r.body))
    header_names = ("authorization", "x-stainless-read-timeout")
    return [(r.body, [r.headers.get(name) for name in header_names]) for r in requests]


def the_attempts(cfg, servers):
    """Return the number of attempts at a failing server and whether they were 1/3 s apart."""

    async def work(clients):
        servers[0].fail(500, times=None)
        await clients.translate(record(), temperature=0.0, n=1, seed=1)

    assert "500" in call_services(cfg, servers, work)
    times = [r.time for r in servers[0].requests]
    return len(times), max(b - a for a, b in pairwise(times)) > 0.3


def the_crowd(cfg, servers):
    """Return the maximum number of concurrent requests of 12."""
    teacher, expected = servers[0], min(12, cfg.teacher.max_concurrency)

    async def work(clients):
        teacher.hang = True
        work = [
            clients.translate(record(source_text=f"{i} 번"), temperature=0.0, n=1, seed=1)
            for i in range(12)
        ]
        group = asyncio.gather(*work)
        await asyncio.to_thread(wait_until, lambda: teacher.in_flight == expected)
        teacher.hang = False
        await group

    assert call_services(cfg, servers, work) is None
    return teacher.peak_requests


def the_scoring(cfg, servers):
    """Return the number of scored candidates, the request sizes and the cached answers."""
    candidates = [{"index": i, "text": f"A text {i}", "finish_reason": "stop"} for i in range(10)]
    sent = []

    async def work(clients):
        result = await ScoreSelectBest().process(record(candidates=candidates), clients)
        return len(result.record["topk"])

    with pytest.MonkeyPatch.context() as patch:
        send = httpx.AsyncClient.send

        async def noted(self, request, **more):
            if request.url.path == "/v1/score":
                sent.append(json.loads(request.content))
            return await send(self, request, **more)

        patch.setattr(httpx.AsyncClient, "send", noted)
        outcome = call_services(cfg, servers, work)
    cached = cfg.metricx.cache_db is not None and Path(cfg.metricx.cache_db).exists()
    return outcome, sorted(len(body["samples"]) for body in sent), cached


def the_filter(cfg, servers, text="Here is the translation: a sentence.", src=SOURCE):
    """Return the filter's result for a translation and the judge's requests."""
    sent = []

    async def work(clients):
        topk = [{"index": 0, "text": text, "score": 1.0}]
        result = await FormatFilter().process(record(source_text=src, topk=topk), clients)
        return getattr(result, "reason_code", "kept"), isinstance(result, RejectedRecord)

    with pytest.MonkeyPatch.context() as patch:
        send = httpx.AsyncClient.send

        async def noted(self, request, **more):
            if request.url.path == "/v1/score":
                sent.append(json.loads(request.content)["options"])
            return await send(self, request, **more)

        patch.setattr(httpx.AsyncClient, "send", noted)
        return call_services(cfg, servers, work, FormatFilter().uses(cfg)), sent


def the_good(cfg, servers):
    """Run the filter on a translation that passes all rules."""
    return the_filter(cfg, servers, "This is a Korean sentence. There is a second one.")


def the_unjudged(cfg, servers):
    """Run the filter on a translation that is too long for the judge."""
    src = (
        "도서관은 오래된 강가의 건물에 있고 아침 일찍 문을 연다. 학생들은 조용한 방에서 책을 읽고, "
        "저녁이 되면 관장이 등불을 끄고 모두에게 인사를 건넨 뒤 천천히 집으로 걸어간다."
    )
    text = (
        "The library stands in an old house by the river and opens early in the morning. Students "
        "read in its quiet rooms, and at night the head librarian puts out the lamps, greets "
        "everyone and walks home slowly."
    )
    return the_filter(cfg, servers, text, src)


def the_log(cfg, servers):
    try:
        run_stages(cfg, RunOptions(stages=("sample_sources",)))
        return (cfg.run.out_dir / "logs.txt").read_text() == ""
    finally:
        structlog.reset_defaults()


#: Key of the seed's YAML -> another value and the function that shows the difference.
CHANGES = {
    "run.out_dir": (None, None),  # the_sample reads this file from each test's own folder
    "run.seed": (99, the_sample),
    "run.log_level": ("ERROR", the_log),
    "data.madlad_dataset": ("someone/madlad", the_hub),
    "data.madlad_split": ("noisy", the_sample),
    "data.src_lang": ("eng", the_sample),
    "data.tgt_lang": ("deu", the_requests),
    "data.target_examples_total": (5, the_selection),
    "data.sample_pool_size": (20, the_sample),
    "segmentation.mode": ("list_field", the_sample),
    "segmentation.min_chars": (40, the_sample),
    "segmentation.max_chars": (60, the_sample),
    "bucketing.boundaries": ([0, 20, 999], the_sample),
    "bucketing.measure": ("whitespace", the_sample),
    "bucketing.per_bucket_quota": (2, the_sample),
    "teacher.backend": ("another", None),  # the schema refuses it
    "teacher.base_url": ("http://127.0.0.1:1/v1", the_requests),
    "teacher.api_key_env": ("OTHER_KEY", the_requests),
    "teacher.model": ("unknown", the_requests),
    "teacher.request_timeout_s": (1000, the_requests),
    "teacher.max_concurrency": (3, the_crowd),
    "teacher.retry.max_attempts": (4, the_attempts),
    "teacher.retry.backoff_s": ([0.5], the_attempts),
    "teacher.generation.max_tokens": (100, the_requests),
    "teacher.generation.top_p": (0.9, the_requests),
    "teacher.generation.greedy_temperature": (0.1, the_requests),
    "teacher.generation.sample_temperature": (0.7, the_requests),
    "teacher.generation.final_temperature": (0.8, the_requests),
    "teacher.generation.seed": (7, the_requests),
    "final_generation.num_candidates": (4, the_requests),
    "final_generation.store_top_k": (4, the_scoring),
    "final_generation.strategy": ("per_call", the_requests),
    "final_generation.blob.enabled": (False, the_sample),
    "final_generation.blob.blob_ratio": (0.1, the_sample),
    "final_generation.blob.blob_max_tokens": (40, the_sample),
    "metricx.url": (f"http://127.0.0.1:{free_port()}", None),
    "metricx.checkpoint": ("google/metricx-24-hybrid-xl-v2p6", the_scoring),
    "metricx.batch_size": (4, the_scoring),
    "metricx.device": ("cuda", the_scoring),
    "metricx.cache_db": ("CACHE", the_scoring),
    "filters.rule_based": (False, the_filter),
    "filters.llm_judge.enabled": (False, the_good),
    "filters.llm_judge.url": ("METRICX", the_good),
    "filters.llm_judge.model": ("another", the_good),
    "filters.llm_judge.temperature": (0.5, the_good),
    "filters.llm_judge.max_tokens": (64, the_good),
    "filters.llm_judge.fail_policy": ("permissive", the_unjudged),
}


def keys_of(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from keys_of(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def test_the_table_holds_every_key_of_the_file():
    """Check the table of keys. `teacher.generation.seed` is only a comment in the file."""
    data = yaml.safe_load(SEED.read_text(encoding="utf-8"))
    assert set(CHANGES) == {*keys_of(data), "teacher.generation.seed"}


def test_the_seeds_values_are_read_as_they_stand():
    cfg = load_config(SynthConfig, SEED)
    assert cfg.data.src_lang == "kor" and cfg.bucketing.boundaries[-1] == 999_999
    assert cfg.teacher.retry.backoff_s == [1, 2, 4, 8, 16, 32]
    assert cfg.final_generation.blob.blob_max_tokens == 512
    with pytest.raises(UserError, match=r"teacher\.backend"):
        load_config(SynthConfig, SEED, ["teacher.backend=another"])


def changed(data, key, value, folder):
    """Return the config with one key changed, in its own folder."""
    data = copy.deepcopy(data)
    *sections, last = key.split(".")
    section_values = data
    for section in sections:
        section_values = section_values[section]
    section_values[last] = value
    data["run"]["out_dir"] = str(folder)
    return SynthConfig.model_validate(data)


@pytest.mark.parametrize("key", [key for key, (_, observe) in CHANGES.items() if observe])
def test_a_key_changes_what_the_pipeline_does(key, base, servers, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "first")
    monkeypatch.setenv("OTHER_KEY", "second")
    value, observe = CHANGES[key]
    value = {"CACHE": str(tmp_path / "scores.sqlite"), "METRICX": servers[2]}.get(str(value), value)
    if key == "segmentation.mode":  # an error if no data matches the mode
        with pytest.raises(UserError, match="no source left"):
            observe(changed(base, key, value, tmp_path / "b"), servers)
        return
    before = observe(SynthConfig.model_validate(base), servers)
    after = observe(changed(base, key, value, tmp_path / "b"), servers)
    assert before != after


OBSERVERS = list(dict.fromkeys(observe for _, observe in CHANGES.values() if observe))


@pytest.mark.parametrize("observe", OBSERVERS, ids=lambda observe: observe.__name__)
def test_without_a_change_it_does_the_same_in_another_folder(observe, base, servers, tmp_path):
    cfg = changed(base, "run.seed", base["run"]["seed"], tmp_path / "b")
    assert observe(SynthConfig.model_validate(base), servers) == observe(cfg, servers)


def test_a_scorer_that_is_not_there_is_named(base, servers, tmp_path, monkeypatch):
    monkeypatch.setattr("scorekit.client.ScoringClient.wait_ready", _at_once)
    cfg = changed(base, "metricx.url", f"http://127.0.0.1:{free_port()}", tmp_path / "b")
    assert (
        "metricx.url: the url cannot be reached: refused. Start it" in the_scoring(cfg, servers)[0]
    )


async def _at_once(self, timeout_s):
    from scorekit.errors import ServiceUnreachable

    raise ServiceUnreachable("the url", "refused")


def test_nothing_is_written_outside_of_out_dir(base, servers, tmp_path):
    the_sample(SynthConfig.model_validate(base), servers)
    assert os.listdir(tmp_path) == ["run"]
