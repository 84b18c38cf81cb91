"""vLLM servers whose answers are no completions: turns go elsewhere, and they are counted."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from scorekit.errors import UserError
from scorekit.server.fake import FakeBackend
from testing.servers import running_app, running_service, wait_until
from tests.integration.trainer.rl.engines.test_vllm_servers import complete, in_thread
from tests.kits.trainer.runs import example
from tests.kits.trainer.vllm_servers import MODES, NO_FAULTS, ServedRun, make_stubs, seeded, serving
from tests.kits.trainer.vllm_servers import key as key
from tests.kits.trainer.vllm_servers import policy as policy
from tests.kits.vllm_stub import VLLMStub
from trainer.rl.config import VLLMConfig
from trainer.rl.distributed import DistributedContext
from trainer.rl.engines.choice import probe_server
from trainer.rl.engines.vllm_protocol import FAULT_CAUSES
from trainer.rl.sampler import CompletionFailed
from trainer.translation.config import TranslationConfig
from trainer.translation.train import train_translation

Answer = dict[str, Any]


def cut(answer: Answer) -> Answer:
    """Return what is left of completions that are aborted after their first token."""
    for choice in answer["choices"]:
        choice |= {"token_ids": choice["token_ids"][:1], "finish_reason": "abort"}
    return answer


def leave_vocabulary(answer: Answer) -> Answer:
    for choice in answer["choices"]:
        choice["token_ids"][0] = 10**6
    return answer


def raise_logprobs(answer: Answer) -> Answer:
    for choice in answer["choices"]:
        logprobs = choice["logprobs"]
        if "content" in logprobs:
            logprobs["content"][0]["logprob"] = 1.0
        else:
            logprobs["token_logprobs"][0] = 1.0
    return answer


def ask_for(run: ServedRun, number: int) -> Any:
    """Return the completion of a prompt of its own, which is checked."""
    prompt = seeded([3, 4 + number % 5, 4 + number // 5, 2], number)
    completion = asyncio.run(complete(run, prompt))
    run.check(prompt, completion)
    return completion


def fault_counts(run: ServedRun) -> dict[str, int]:
    """Return the counts since the last call that are not zero."""
    stats = run.sampler.stats()
    by_cause: dict[str, Any] = {cause: stats[f"sampler_faults_{cause}"] for cause in FAULT_CAUSES}
    assert stats["sampler_faults"] == sum(by_cause.values())
    return {cause: count for cause, count in by_cause.items() if count}


@pytest.mark.parametrize(("mode", "count"), [*((mode, 2) for mode in MODES), ("labels", 1)])
def test_a_completion_that_a_pause_aborts_is_sampled_again(
    policy: Path, tmp_path: Path, mode: str, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    stubs = make_stubs(policy, mode, count)
    with serving(stubs, policy, tmp_path, mode) as run:
        stubs[0].blocked_prompts, stubs[0].blocked_token = {3}, 1
        thread, results = in_thread(complete(run, seeded([3, 4, 2], 1)))
        wait_until(lambda: stubs[0].entered == 1)
        stubs[0].pause()
        stubs[0].resume()
        stubs[0].blocked_prompts = set()
        stubs[0].release.set()
        thread.join()
        (completion,) = results
        run.check(seeded([3, 4, 2], 1), completion)
        assert len(completion.token_ids) > 1
        assert fault_counts(run) == {"unfinished": 1} and fault_counts(run) == {}
    assert f"{run.urls[0]} gave finish_reason 'abort' after 1 of 6 ids" in caplog.text
    assert "gave 1 answers that are no completions of the policy (unfinished 1)" in caplog.text


@pytest.mark.parametrize(
    ("mode", "spoil", "cause"),
    [
        ("labels", cut, "unfinished"),
        ("adapters", leave_vocabulary, "ids"),
        ("drained", raise_logprobs, "logprobs"),
    ],
)
def test_turns_of_a_faulty_server_go_to_the_others_until_it_is_sound_again(
    policy: Path,
    tmp_path: Path,
    mode: str,
    spoil: Callable[[Answer], Any],
    cause: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    stubs = make_stubs(policy, mode)
    with serving(stubs, policy, tmp_path, mode) as run:
        stubs[0].spoil = spoil
        ask_for(run, 0)
        assert f"{run.urls[0]} is left out: it gave " in caplog.text
        stats = run.sampler.stats()
        assert (stats["sampler_servers"], stats["sampler_moved"]) == (1, 1)
        assert stats[f"sampler_faults_{cause}"] == stats["sampler_faults"] == 3
        wait_until(lambda: f"{run.urls[0]} does not take part yet" in caplog.text)
        ask_for(run, 1)
        assert fault_counts(run) == {}
        stubs[0].spoil = lambda answer: answer
        wait_until(lambda: len(run.sampler._pool.up) == 2)


@pytest.mark.parametrize("count", [1, 2])
def test_if_all_servers_are_faulty_the_error_names_them_and_the_cause(
    policy: Path, tmp_path: Path, count: int
) -> None:
    stubs = make_stubs(policy, "labels", count)
    with serving(stubs, policy, tmp_path, "labels") as run:
        for stub in stubs:
            stub.spoil = cut
        with pytest.raises(UserError) as caught:
            ask_for(run, 0)
        message = str(caught.value)
        assert not isinstance(caught.value, CompletionFailed)
        for url in run.urls:
            assert f"{url} gave no completion 3 times (last: finish_reason 'abort'" in message
        assert "Let nothing else pause vLLM" in message and "\n" not in message
        assert fault_counts(run) == {"unfinished": 3 * count}


def test_stats_are_of_all_processes(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs = make_stubs(policy, "labels", 1)
    with serving(stubs, policy, tmp_path, "labels") as run:
        stubs[0].spoil = cut
        with pytest.raises(UserError):
            ask_for(run, 0)

        def gather(self: DistributedContext, items: list[Any]) -> list[Any]:
            return [*items, {**items[0], "sampler_servers": 0, "sampler_moved": 2}]

        with monkeypatch.context() as patch:
            patch.setattr(DistributedContext, "gather", gather)
            stats = run.sampler.stats()
    expected = {"sampler_servers": 0, "sampler_moved": 2}
    expected |= {"sampler_faults": 6, "sampler_faults_unfinished": 6}
    assert stats == NO_FAULTS | expected


def test_many_turns_of_faulty_servers_end_with_one_error(policy: Path, tmp_path: Path) -> None:
    stubs = make_stubs(policy, "labels")
    with serving(stubs, policy, tmp_path, "labels") as run:
        for stub in stubs:
            stub.spoil = leave_vocabulary

        async def ask_all() -> list[Any]:
            prompts = [seeded([3, 4, 2], seed) for seed in range(6)]
            asking = (complete(run, prompt) for prompt in prompts)
            return await asyncio.gather(*asking, return_exceptions=True)

        results = asyncio.run(ask_all())
        assert {type(result) for result in results} == {UserError}
        for url in run.urls:
            assert all(url in str(result) for result in results)


def test_a_turn_that_no_server_completes_fails_alone(policy: Path, tmp_path: Path) -> None:
    class Picky(VLLMStub):
        def generate(self, body: dict[str, Any]) -> Any:
            answer = super().generate(body)
            if body["token_ids"][:2] == [7, 7]:
                self.first_bad.append(body)
                answer.body = json.dumps(cut(json.loads(answer.body))).encode()
                answer.headers["content-length"] = str(len(answer.body))
            return answer

    stubs = [Picky(policy, routes=("dev", "ids")) for _ in range(2)]
    for stub in stubs:
        stub.first_bad = []  # type: ignore[attr-defined]
    with serving(stubs, policy, tmp_path, "labels") as run:

        async def work() -> Any:
            bad = asyncio.create_task(complete(run, seeded([7, 7, 2], 1)))
            number = 0
            while not bad.done():
                number += 1
                await complete(run, seeded([3, 4, 2], number))
            return bad.exception()

        error = asyncio.run(work())
        assert isinstance(error, CompletionFailed) and "finish_reason 'abort'" in str(error)
        assert fault_counts(run) == {"unfinished": 6}


def test_a_turn_waits_for_a_server_that_restarts_if_the_other_one_is_faulty(
    policy: Path, tmp_path: Path
) -> None:
    stubs = make_stubs(policy, "labels")
    with serving(stubs, policy, tmp_path, "labels") as run:
        stubs[0].spoil = cut
        stubs[1].kill()
        thread, results = in_thread(complete(run, seeded([3, 4, 2], 1)))
        wait_until(lambda: run.sampler._turns.num_faults["unfinished"] >= 3)
        wait_until(lambda: not run.sampler._pool.up)
        stubs[1].restart()
        thread.join()
        run.check(seeded([3, 4, 2], 1), results[0])


def test_a_server_that_is_faulty_at_the_start_is_told(policy: Path, tmp_path: Path) -> None:
    stubs = make_stubs(policy, "labels")
    with ExitStack() as stack:
        urls = [stack.enter_context(running_app(stub.app)) for stub in stubs]

        def spoil(answer: Answer) -> Answer:
            return leave_vocabulary(answer) if len(answer["choices"]) == 4 else answer

        stubs[1].spoil = spoil  # the completions that are compared with the trainer's
        with pytest.raises(UserError, match=rf"{urls[1]} gave id 1000000, but the policy has"):
            with serving(stubs[:0], policy, tmp_path, "labels", url=urls):
                pass


def drop_choices(answer: Answer) -> Answer:
    return answer | {"choices": []}


def drop_logprobs(answer: Answer) -> Answer:
    return answer | {"choices": [c | {"logprobs": None} for c in answer["choices"]]}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (cut, "finish_reason 'abort'. Let nothing else pause vLLM"),
        (drop_choices, "gave no completion"),
        (drop_logprobs, "--logprobs-mode processed_logprobs"),
    ],
)
def test_a_check_before_the_run_names_what_a_server_gives_instead(
    policy: Path, spoil: Callable[[Answer], Any], message: str
) -> None:
    stub = VLLMStub(policy)
    stub.spoil = spoil
    with running_app(stub.app) as url, pytest.raises(UserError, match=message):
        probe_server(VLLMConfig(url=url), adapters=False)


# -- whole runs ------------------------------------------------------------------------------------


def train(policy: Path, run_dir: Path, stub: VLLMStub) -> list[dict[str, Any]]:
    """Train on one server, and return the lines of log.jsonl."""
    rows = [example("abcd"[:n] + "ef", str(n)) for n in range(1, 5)]
    with running_app(stub.app) as url, running_service(FakeBackend("metricx")) as metricx:
        cfg = TranslationConfig.model_validate(
            {
                "policy": {"path": str(policy)},
                "generation": {
                    "prompt_template": "source",
                    "max_new_tokens": 8,
                    "temperature": 0.8,
                    "engine": "vllm",
                    "vllm": {"url": url, "timeout_s": 60.0},
                },
                "reward": {"metricx_urls": [metricx], "w_xcomet_span": 0.0},
                "rl": {"num_updates": 2, "batch_size": 4, "lr": 0.01},
                "misc": {"run_dir": str(run_dir), "device": "cpu", "threads": 1},
            }
        )
        train_translation(rows, rows[:2], cfg)
    return [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]


def test_a_run_counts_lost_completions_in_its_log_and_learns_none(
    policy: Path, tmp_path: Path
) -> None:
    """Check that a run whose server loses some completions learns the same as one without."""
    num_answers = [0]

    def lose_some(answer: Answer) -> Answer:
        num_answers[0] += 1
        is_of_training = len(answer["choices"]) == 4 and answer["choices"][0]["logprobs"]
        return cut(answer) if is_of_training and num_answers[0] % 3 == 0 else answer

    sound = train(policy, tmp_path / "sound", VLLMStub(policy, routes=("dev", "ids")))
    stub = VLLMStub(policy, routes=("dev", "ids"))
    stub.spoil = lose_some
    lossy = train(policy, tmp_path / "lossy", stub)
    assert [line["sampler_faults"] for line in sound] == [0, 0]
    assert sum(line["sampler_faults"] for line in lossy) > 0
    assert all(line["sampler_faults_unfinished"] == line["sampler_faults"] for line in lossy)
    for stat in ("completion_length_mean", "truncated_frac", "policy_loss", "grad_norm"):
        assert [line[stat] for line in lossy] == [line[stat] for line in sound]


def test_a_run_on_a_server_that_loses_all_completions_ends_and_learns_nothing(
    policy: Path, tmp_path: Path
) -> None:
    stub = VLLMStub(policy, routes=("dev", "ids"))

    def lose_of_training(answer: Answer) -> Answer:
        is_of_training = len(answer["choices"]) == 4 and len(stub.bodies) > 6
        return cut(answer) if is_of_training else answer

    stub.spoil = lose_of_training
    with pytest.raises(UserError, match=r"no completion 3 times \(last: finish_reason 'abort'"):
        train(policy, tmp_path / "run", stub)
    assert (
        not (tmp_path / "run" / "log.jsonl").exists()
        or not (tmp_path / "run" / "log.jsonl").read_text()
    )
