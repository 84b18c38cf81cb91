"""Run real training of a searcher against servers and a learner of set speed.

The trainer, its collector, its loop, its HTTP clients and its files are the project's own. The
policy is tiny. Sampler, generator and judge are servers in another process that take the time that
the settings say; the retriever is the project's own with a delay. The learner's time is a pause
within each update.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import httpx

from bench.common import ROOT, WORK, in_own_process, quiet_logs
from bench.scaling.settings import PlannedEpisode, PlannedTurn, RunSettings, ServiceSettings
from bench.scaling.timed_server import MODEL, ScriptedTurn, timed_app
from scorekit.seeds import stream_seed
from testing.flaky_server import FlakyServer
from testing.judge import judge_app
from testing.openai_server import FakeOpenAI
from testing.servers import running_app, wait_ready

FOLDER = WORK / "scaling"
CONFIG = ROOT / "configs/search/demo_phase1.yaml"
TOKENIZER = ROOT / "demo/models/search_policy"
#: Seed of a run, and turns of an episode.
SEED, MAX_TURNS = 1, 6
COMPLETE = "<think>enough</think>\n<search_complete>true</search_complete>"
QUESTIONS = ROOT / "demo/search/questions.jsonl"
#: Services of a run, in the order of RunSettings: one tool, two scorers.
RETRIEVER, GENERATOR, JUDGE = "retriever", "generator", "judge"


@dataclass(frozen=True, slots=True)
class EpisodeLengths:
    """Distribution of a run's episodes.

    mean_tokens: of a turn.
    spread: sigma of their logarithm.
    stop_chance: that a turn from the second on is the last one.
    """

    mean_tokens: float = 25.0
    spread: float = 0.8
    stop_chance: float = 0.4

    def plan(self, update: int, position: int) -> PlannedEpisode:
        """Return the episode at a position of an update, the same for simulation and real run."""
        dice = random.Random(f"{self} {update} {position}")
        turns: list[PlannedTurn] = []
        while len(turns) < MAX_TURNS:
            tokens = round(dice.lognormvariate(0.0, self.spread) * self.mean_tokens)
            turns.append(PlannedTurn(max(1, min(tokens, 20 * round(self.mean_tokens)))))
            if len(turns) > 1 and dice.random() < self.stop_chance:
                break
        return PlannedEpisode(prompt_tokens=1, turns=tuple(turns))


def services(
    retriever_s: float, generator_s: float, judge_s: float, parallel: int = 32
) -> dict[str, Any]:
    """Return the services of RunSettings with these delays.

    parallel: calls of a scorer at once.
    """
    return {
        "tools": (ServiceSettings(RETRIEVER, retriever_s),),
        "scorers": (
            ServiceSettings(GENERATOR, generator_s, parallel),
            ServiceSettings(JUDGE, judge_s, parallel),
        ),
    }


def real_run(cfg: RunSettings, warm_up: int = 1) -> dict[str, Any]:
    """Return the seconds of each update of a real run, and of its phases.

    warm_up: updates at the start that are left out.
    """
    assert cfg.samplers.prefill_s_per_token == 0, "the servers of a real run know no prefill"
    make_index()
    script = make_script(cfg)
    with _servers_in_another_process(cfg, script) as urls:
        result = in_own_process(_train, without_plan(cfg), urls, warm_up)
        usage = [httpx.get(f"{url}/usage").json() for url in urls["samplers"]]
    return result | {
        "sampler_busy_s": [server["busy_s"] for server in usage],
        "turns": sum(server["turns"] for server in usage),
        "calls_of_a_turn": max(server["calls_of_a_turn"] for server in usage),
    }


def without_plan(cfg: RunSettings) -> RunSettings:
    """Return the settings without their plan, which cannot be sent to another process."""
    return replace(cfg, episode=_no_plan)


def _no_plan(update: int, position: int) -> PlannedEpisode:
    raise AssertionError("the script has the episodes")


@cache
def make_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TOKENIZER)


@cache
def _answers() -> dict[str, str]:
    """Return the reference answer of each of the demo's questions."""
    rows = map(json.loads, QUESTIONS.read_text(encoding="utf-8").splitlines())
    return {row["question"]: row["reference_answer"] for row in rows}


def make_script(cfg: RunSettings) -> dict[int, ScriptedTurn]:
    """Return the turns of a run by the seeds that the trainer sends."""
    tokenizer, script = make_tokenizer(), {}
    for update in range(1, cfg.updates + 1):
        episodes_seed = stream_seed("episodes", SEED, update)
        for position in range(cfg.batch_episodes):
            index, sample = divmod(position, cfg.group)
            turns = cfg.episode(update, position).turns
            for number, turn in enumerate(turns, 1):
                seed = stream_seed("turns", episodes_seed, f"{update}-{index}-{sample}", number)
                text = COMPLETE
                if number < len(turns):
                    query = random.Random(seed).choice(list(_answers()))
                    text = f"<think>look</think>\n<search>{query}</search>"
                ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
                script[seed] = ScriptedTurn(ids, turn.completion_tokens)
    return script


@contextmanager
def _servers_in_another_process(
    cfg: RunSettings, script: Mapping[int, ScriptedTurn]
) -> Iterator[dict[str, Any]]:
    """Start all servers in a process of their own, so that they do not share the trainer's GIL."""
    pipe, child_pipe = get_context("spawn").Pipe()
    args = (child_pipe, without_plan(cfg), script)
    process = get_context("spawn").Process(target=_serve, args=args)
    process.start()
    child_pipe.close()  # else the end of the child would not be seen here
    try:
        yield pipe.recv()
    finally:
        pipe.close()
        process.join()


def answer_half_right(body: dict[str, Any], seed: int | None) -> str:
    """Answer right for half of all questions and images, so that rewards differ."""
    sent = str(body["messages"])
    if random.Random(sent).random() < 0.5:
        return "not known"
    return next(right for question, right in _answers().items() if question in sent)


def _serve(pipe: Connection, cfg: RunSettings, script: Mapping[int, ScriptedTurn]) -> None:
    from scorekit.server.app import create_app
    from scorekit.server.settings import ServiceSettings as HttpSettings
    from services.retriever.model import RetrieverBackend

    quiet_logs()
    (retriever_s, generator_s, judge_s) = (s.latency_s for s in (*cfg.tools, *cfg.scorers))

    settings = HttpSettings(cache="memory")
    service = create_app(RetrieverBackend(make_index()), settings, None)
    retriever = FlakyServer(service, latency_s=lambda path: retriever_s * path.endswith("search"))
    generator = FlakyServer(
        FakeOpenAI("generator", respond=answer_half_right).app,
        latency_s=lambda path: generator_s * path.endswith("completions"),
    )
    judge = FlakyServer(judge_app(), latency_s=lambda path: judge_s * path.endswith("score"))
    vocabulary = len(make_tokenizer())
    with ExitStack() as stack:
        apps: list[Any] = [retriever, generator, judge]
        apps += [
            timed_app(cfg.samplers, script, vocabulary, cfg.learner.load_s)
            for _ in range(cfg.samplers.servers)
        ]
        urls = [stack.enter_context(running_app(app)) for app in apps]
        wait_ready(urls[0])
        wait_ready(urls[2])
        pipe.send(
            {
                RETRIEVER: urls[0],
                GENERATOR: f"{urls[1]}/v1",
                JUDGE: urls[2],
                "samplers": urls[3:],
            }
        )
        with suppress(EOFError):
            pipe.recv()


def make_index() -> Path:
    """Return an index of the demo's slides."""
    from demo.search.run import HERE, ingest

    index = FOLDER / "index"
    if not index.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        ingest(index, HERE / "corpus")
    return index


def _policy() -> Path:
    """Return a tiny policy whose head is zero: all ids are equally likely."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder, tokenizer = FOLDER / "policy", make_tokenizer()
    if not (folder / "config.json").exists():
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=4096,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=False,
        )
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            model.lm_head.weight.zero_()
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    return folder


def _train(cfg: RunSettings, urls: Mapping[str, Any], warm_up: int) -> dict[str, Any]:
    """Run the training command's own function; return the times of its updates."""
    from bench.search_step.sides import timed_updates
    from scorekit.config import load_config
    from trainer.search.config import SearchConfig
    from trainer.search.data import load_train
    from trainer.search.training.train import SearchTask, run_search

    run_dir = FOLDER / f"run-{os.getpid()}"
    overrides = [f"{key}={value}" for key, value in config_values(cfg, urls, run_dir).items()]
    search_cfg = load_config(SearchConfig, CONFIG, overrides)
    make_advantages = SearchTask.advantages
    learn_s = cfg.learner.s_per_update + cfg.learner.s_per_sequence * cfg.batch_episodes

    def advantages(self: Any, rollouts: Any, rewards: Any) -> Any:
        time.sleep(learn_s)
        return make_advantages(self, rollouts, rewards)

    with mock.patch.object(SearchTask, "advantages", advantages), timed_updates() as ends:
        artifacts = run_search(load_train(search_cfg), {}, search_cfg)
    assert len(artifacts.updates) == cfg.updates, artifacts.stopped
    assert all(line["reward_coverage"] == 1 for line in artifacts.updates), "a reward is missing"
    for line in artifacts.updates:
        assert line["staleness_max"] <= cfg.max_staleness, f"update {line['update']} is too old"
    shutil.rmtree(run_dir)
    seconds = [later - earlier for earlier, later in itertools.pairwise(ends)]
    names = ("rollout_s", "logprob_s", "reward_s", "waited_s", "update_s", "staleness_max")
    lines = [{name: line[name] for name in names if name in line} for line in artifacts.updates]
    return {
        "updates_s": seconds[warm_up:],
        "lines": lines[warm_up:],
        "first_s": seconds[:warm_up],
        "wall_s": sum(seconds),
    }


def config_values(cfg: RunSettings, urls: Mapping[str, Any], run_dir: Path) -> dict[str, Any]:
    """Return the values of the run's config that differ from the demo's."""
    scorers = {service.name: service.parallel for service in cfg.scorers}
    return {
        "data.eval": "null",
        "retriever.url": urls[RETRIEVER],
        "policy.path": _policy(),
        "episode.max_turns": MAX_TURNS,
        "episode.max_response_length": 1000,
        "rollout.n_agent": cfg.group,
        "reward.preset": "phase2",
        "generation.engine": "vllm",
        "generation.vllm.url": urls["samplers"][0],
        "generation.vllm.model": MODEL,
        "answering.generator.base_url": urls[GENERATOR],
        "answering.generator.model": "generator",
        "answering.generator.max_requests": scorers[GENERATOR],
        "answering.judge.url": urls[JUDGE],
        "answering.judge.max_in_flight": scorers[JUDGE],
        "rl.batch_size": cfg.batch_size,
        "rl.minibatch_size": cfg.batch_episodes,
        "rl.num_updates": cfg.updates,
        "rl.max_staleness": cfg.max_staleness,
        "rl.lr": 1e-8,
        "misc.device": "cpu",
        "misc.threads": 1,
        "misc.seed": SEED,
        "misc.run_dir": run_dir,
    }
