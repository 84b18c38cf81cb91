"""Check that a server that fails one episode's requests delays no other episode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from scorekit.llm import LLMClient, Sampling
from scorekit.retrieval.client import Retriever
from testing.flaky_server import FAULTS, Fault, FlakyServer
from testing.openai_server import FakeOpenAI
from testing.servers import running_app
from tests.integration.trainer.rl.test_vllm_engine import config
from tests.kits.retrieval.stand_in import StandInRetriever
from tests.kits.trainer.runs import letter_tokenizer, save_policy
from tests.kits.trainer.searching.episodes import COMPLETE, ask, search
from tests.kits.trainer.searching.pages import PagesHere
from tests.kits.vllm_stub import KEY, VLLMStub
from trainer.rl.distributed import DistributedContext
from trainer.rl.engines.choice import probe_server
from trainer.rl.engines.vllm import VLLMSampler
from trainer.rl.policy import load_policy, stop_token_ids
from trainer.rl.sampler import CompletionFailed, SampledCompletion, SeededPrompt
from trainer.search.config import EpisodeConfig, SearchConfig
from trainer.search.records import Trajectory
from trainer.search.reward import RewardStream
from trainer.search.rollout.episode import run_episodes
from trainer.search.rollout.episode_runner import EpisodeRunner
from trainer.search.rollout.policies import ChatPolicy, ScriptPolicy
from trainer.search.trajectories.store import TrajectoryStore

PAGES = {"deck_1": "births in korea", "deck_2": "births in europe", "deck_3": "rainfall bad"}
#: Faults after which a client tries again, so that the episode goes on when the server is well.
PASSING: tuple[Fault, ...] = ("429", "503", "cut", "hang")
GOOD, BAD = 8, "0-0-0"


@contextmanager
def failing_for(
    app: object, failure: Fault, is_bad: Callable[[str], bool]
) -> Iterator[FlakyServer]:
    """Serve an app that fails one kind of request, at most until the block ends."""
    flaky = FlakyServer(app, lambda path, body: failure if is_bad(body) else None)
    try:
        yield flaky
    finally:
        flaky.recover()


class Ends:
    """Notes the ends of episodes, and lets the server recover when all good ones have ended."""

    def __init__(self, server: FlakyServer) -> None:
        self.server, self.ids = server, list[str]()

    def __call__(self, trajectory: Trajectory) -> None:
        self.ids.append(trajectory.trajectory_id)
        if len(set(self.ids) - {BAD}) == GOOD:
            self.server.recover()

    def check(self, trajectories: list[Trajectory], failure: Fault) -> None:
        bad, *good = trajectories
        assert [trajectory.end for trajectory in good] == ["complete"] * GOOD
        assert bad.end in ("complete", "failed")
        if failure in PASSING:
            assert bad.end == "complete" and self.ids[-1] == BAD


@pytest.mark.parametrize("failure", FAULTS)
def test_a_retriever_that_fails_one_episode_delays_no_other(failure: Fault, tmp_path: Path) -> None:
    stand_in = StandInRetriever(PAGES)
    bad, good = [search("bad"), COMPLETE], [*[search("births")] * 3, COMPLETE]
    policy = ScriptPolicy(
        lambda request: (bad if request.trajectory_id == "0-0-0" else good)[request.turn - 1]
    )
    cfg = SearchConfig.model_validate({"reward": {"preset": "phase1"}})
    store = TrajectoryStore(tmp_path / "trajectories", "run")
    with (
        failing_for(stand_in.app, failure, lambda body: "bad" in body) as server,
        running_app(server) as url,
        closing(Retriever(url, timeout_s=60, deadline_s=60)) as retriever,
        closing(RewardStream(cfg.reward, None, store.read_image)) as stream,
    ):
        ends = Ends(server)
        runner = EpisodeRunner(cfg, retriever, stream, store, tolerates_outage=True)
        rows = [(0, ask("bad")), (1, ask("good", n_agent=GOOD))]
        done = runner.run(policy, rows, step=0, samples=1, on_done=ends)
    ends.check(list(done.values()), failure)


@pytest.mark.parametrize("failure", FAULTS)
def test_a_policy_server_that_fails_one_episode_delays_no_other(failure: Fault) -> None:
    fake = FakeOpenAI("searcher", respond=lambda body, seed: COMPLETE)
    with (
        failing_for(fake.app, failure, lambda body: "bad one" in body) as server,
        running_app(server) as url,
        closing(
            ChatPolicy(lambda: LLMClient(f"{url}/v1", "searcher"), Sampling(max_tokens=64))
        ) as policy,
    ):
        ends = Ends(server)
        rows = [ask("bad", text="A bad one?"), ask("good", n_agent=GOOD)]
        ids = iter([BAD, *(f"good-{n}" for n in range(GOOD))])
        done = run_episodes(
            rows,
            policy,
            PagesHere(),
            EpisodeConfig(),
            new_id=lambda question, sample: next(ids),
            samples=1,
            on_done=ends,
            save_image=lambda sha256, png: None,
        )
    ends.check(done, failure)


@pytest.mark.parametrize("failure", FAULTS)
def test_a_vllm_server_that_fails_one_prompt_delays_no_other(
    failure: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    policy = save_policy(tmp_path / "policy", letter_tokenizer(), initializer_range=0.5)
    stub = VLLMStub(policy)
    ended_numbers: list[int] = []
    with (
        failing_for(stub.app, failure, lambda body: "[7,7,7,2]" in body.replace(" ", "")) as server,
        running_app(server) as url,
    ):
        cfg = config(url, policy, tmp_path / "run")
        name = probe_server(cfg.generation.vllm, adapters=False)
        model, tokenizer = load_policy(cfg.policy, torch.device("cpu"))

        async def complete(number: int, sampler: VLLMSampler) -> SampledCompletion | None:
            ids = [7, 7, 7, 2] if number == 0 else [3, 4, 2]
            prompt = SeededPrompt(ids, [], 1.0, 8, number)
            try:
                return await sampler.complete(prompt, cfg.generation, with_logprobs=True)
            except CompletionFailed:
                return None
            finally:
                ended_numbers.append(number)
                if len(set(ended_numbers) - {0}) == GOOD:
                    server.recover()

        async def all_prompts(sampler: VLLMSampler) -> list[SampledCompletion | None]:
            return await asyncio.gather(*(complete(n, sampler) for n in range(GOOD + 1)))

        stops = stop_token_ids(model, tokenizer)
        sampler = VLLMSampler(
            cfg.generation.vllm,
            name,
            stops,
            DistributedContext(torch.device("cpu")),
            adapters=False,
            run_dir=tmp_path / "run",
        )
        with closing(sampler):
            sampler.sync_weights(model, 0)
            bad, *good = asyncio.run(all_prompts(sampler))
    assert None not in good
    if failure in PASSING:
        assert bad is not None and ended_numbers[-1] == 0
