"""The services of a stage: teacher, MetricX, judge. Cached answers are not requested again.

Small calls of MetricX go together in one request (`CoalescingScorer`). At the end stand the
settings that answers and scores depend on.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from scorekit.client import ScoringClient
from scorekit.errors import ScorekitError, ServiceUnreachable, is_transient
from scorekit.languages import language_name
from scorekit.llm import Choice, LLMClient, LLMError, Message, Sampling
from scorekit.paid.answers import Store
from scorekit.prompts import TEACHER_SYSTEM, fill, load_template
from scorekit.schemas import Result
from scorekit.text.chat_marks import neutral, restore_marks
from synth.config import SynthConfig, languages
from synth.reasons import Family
from synth.record import SourceFailed, TemporaryFailure
from synth.storage.stats import CallStats, StageStats
from synth.storage.store import Record, digest_of

#: Consecutive failures after which an easy request is tried; if it fails, too, the run stops.
FAILURES_IN_A_ROW = 10
#: A text that every working service can translate, score or judge.
EASY = "Good morning."


@dataclass(frozen=True, slots=True)
class Score:
    """A score of MetricX, or the type of its failure; never both."""

    value: float | None
    error: str | None = None


class Clients:
    """The services of one stage, with the cache of their answers."""

    def __init__(
        self,
        cfg: SynthConfig,
        stats: StageStats,
        answers: Store,
        teacher: LLMClient | None,
        metricx: ScoringClient | None,
        judge: ScoringClient | None,
        *,
        identities: Mapping[str, Any] | None = None,
        give_up: bool = False,
    ) -> None:
        self.cfg = cfg
        self.stats = stats
        self._answers = answers
        self._teacher, self._metricx, self._judge = teacher, metricx, judge
        self._coalescing = metricx and CoalescingScorer(metricx, cfg.metricx.batch_size)
        self._identities = dict(identities or {})
        self._give_up = give_up
        self._failing: Counter[str] = Counter()
        self._messages = asking(cfg)
        self.languages = languages(cfg)
        seed = cfg.teacher.generation.seed
        self.seed = cfg.run.seed if seed is None else seed

    @property
    def window(self) -> int:
        """Return how many records are processed at once: just enough to fill all requests."""
        return max(64, 2 * self.cfg.teacher.max_concurrency)

    @property
    def judge_understands(self) -> bool:
        """Return True if there is an LLM judge. The backend `rules` adds nothing to our rules."""
        judge = self._identities.get("judge") or {}
        return self._judge is not None and judge.get("model") != "rules"

    async def translate(
        self, record: Record, *, temperature: float, n: int, seed: int
    ) -> list[dict[str, Any]]:
        """Return n translations {"index", "text", "finish_reason"}; candidate i has seed + i.

        Each candidate has its own cache key: if 128 of 256 are cached, 128 are requested. Raises
        SourceFailed if the source cannot be translated, TemporaryFailure if the teacher failed.
        """
        generation = self.cfg.teacher.generation
        blob = record["source_type"] == "blob"
        settings: dict[str, Any] = {  # top_k, min_p and penalties are always neutral
            "max_tokens": generation.max_tokens_blob if blob else generation.max_tokens,
            "temperature": temperature,
            "top_p": generation.top_p,
        }
        messages = self._messages(record["source_text"])
        teacher = self.cfg.teacher
        keys = _keys(
            ["teacher", teacher.model, teacher.revision, {"messages": messages, **settings}],
            # Greedy decoding ignores the seed.
            [seed + index if temperature else None for index in range(n)],
        )
        answer_by_key = dict(await self._answers.get(keys))
        self.stats.answers_kept += len(answer_by_key)
        missing = [index for index in range(n) if keys[index] not in answer_by_key]
        for part in _runs(missing, self.cfg.candidates_per_request):
            sampling = Sampling(**settings, seed=seed + part.start)
            answer_by_key |= await self._chat(messages, sampling, part, keys)
        src = record["source_text"]
        return [
            {
                "index": index,
                **answer_by_key[key],
                "text": restore_marks(src, answer_by_key[key]["text"]),
            }
            for index, key in enumerate(keys)
        ]

    async def _chat(
        self, messages: Sequence[Message], sampling: Sampling, part: range, keys: Sequence[bytes]
    ) -> dict[bytes, dict[str, Any]]:
        """Return the candidates `part` by key; each is cached as soon as it arrives."""
        assert self._teacher is not None
        answers: dict[bytes, dict[str, Any]] = {}

        async def keep(choices: Sequence[Choice]) -> None:
            self._failing["the teacher"] = 0
            new_answers = {
                keys[part.start + c.index]: {"text": c.text, "finish_reason": c.finish_reason}
                for c in choices
            }
            await self._answers.put(new_answers)
            answers.update(new_answers)

        try:
            await self._teacher.chat(
                messages, sampling, n=len(part), request_id=keys[part.start].hex(), keep=keep
            )
        except LLMError as error:
            raise await self._teacher_failed(error, sampling, len(part)) from None
        return answers

    async def _teacher_failed(self, error: LLMError, sampling: Sampling, n: int) -> ScorekitError:
        """Return the exception for a failed request.

        One source that breaks the server must not stop the others, and a broken server must not
        reject all sources. The failure is not cached: it may depend on the server's settings."""
        assert self._teacher is not None
        if error.type == "overlong":
            return SourceFailed(Family.TEACHER.code(error.type), str(error)[:300])
        in_a_row = self._failed_again("the teacher")
        if (in_a_row or error.server_is_away) and not await self._teacher_answers(sampling, n):
            if error.server_is_away:
                return ServiceUnreachable(self._teacher.base_url, f"the teacher: {error}")
            return ScorekitError(
                f"the teacher failed {FAILURES_IN_A_ROW} requests in a row; the last one: {error}"
            )
        code, message = Family.TEACHER.code(error.type), str(error)[:300]
        if self._give_up or error.type == "refused":
            return SourceFailed(code, message)
        return TemporaryFailure(code, message, error.status)

    async def _teacher_answers(self, sampling: Sampling, n: int) -> bool:
        """Return True if the teacher answers an easy text: then the failure lies with the texts."""
        assert self._teacher is not None
        easy = self._messages(EASY)
        try:
            async with asyncio.timeout(self.cfg.teacher.request_timeout_s):
                sampling = replace(sampling, seed=1)
                await self._teacher.chat(easy, sampling, n=n, request_id=digest_of(easy))
        except (LLMError, TimeoutError):
            return False
        self._failing["the teacher"] = 0
        return True

    def _failed_again(self, service: str) -> bool:
        """Count a failed request; return True if there are too many in a row."""
        self._failing[service] += 1
        return self._failing[service] >= FAILURES_IN_A_ROW

    async def score(self, src: str, mts: Sequence[str]) -> list[Score]:
        """Return each translation's MetricX score, no reference. Raises TemporaryFailure."""
        assert self._metricx is not None
        identity = self._identities.get("metricx")
        keys = _keys(["metricx", identity, src], mts)
        answer_by_key = dict(await self._answers.get(keys))
        self.stats.answers_kept += len(answer_by_key)
        missing = {key: mt for key, mt in zip(keys, mts, strict=True) if key not in answer_by_key}
        if missing:
            samples = [{"src": src, "mt": mt} for mt in missing.values()]
            results = await self._ask(self._metricx, samples, self.stats.metricx, None)
            new_answers = {
                key: {"score": r["score"]} if r["ok"] else {"error": r["error"]["type"]}
                for key, r in zip(missing, results, strict=True)
            }
            await self._keep(new_answers, results, Family.SCORE, "the score of a translation")
            answer_by_key |= new_answers
        return [
            Score(answer_by_key[key].get("score"), answer_by_key[key].get("error")) for key in keys
        ]

    async def judge(self, src: str, candidate: str, doubt: str = "") -> dict[str, Any]:
        """Return the judge's verdict {"pass", "reason_code", "notes"}, or {"error": type, ...}.

        doubt: see `judge_request`. Raises TemporaryFailure unless the policy is permissive."""
        assert self._judge is not None
        sample, options = judge_request(self.cfg, self.languages, src, candidate, doubt)
        key = _key(["judge", self._identities.get("judge"), options, sample])
        answer_by_key = dict(await self._answers.get([key]))
        self.stats.answers_kept += len(answer_by_key)
        if not answer_by_key:
            results = await self._ask(self._judge, [sample], self.stats.judge, options)
            (result,) = results
            answer_by_key = {
                key: result["verdict"] if result["ok"] else {"error": result["error"]["type"]}
            }
            lenient = self.cfg.filters.llm_judge.fail_policy == "permissive"
            await self._keep(answer_by_key, results, Family.JUDGE, "a verdict", lenient=lenient)
        verdict: dict[str, Any] = answer_by_key[key]
        return verdict

    async def _keep(
        self,
        answers: Mapping[bytes, Any],
        results: Sequence[Mapping[str, Any]],
        family: Family,
        description: str,
        *,
        lenient: bool = False,
    ) -> None:
        """Cache the answers. Raises TemporaryFailure if one failed with a transient error."""
        open_ = [r for r in results if _is_transient(r)]
        final_answers = {
            key: answer
            for (key, answer), r in zip(answers.items(), results, strict=True)
            if not _is_transient(r)
        }
        if final_answers:
            await self._answers.put(final_answers)
        if open_ and not (lenient or self._give_up):
            kind = open_[0]["error"]["type"]
            raise TemporaryFailure(family.code(kind), f"{description} did not come: {kind}")

    async def _ask(
        self,
        client: ScoringClient,
        samples: list[dict[str, Any]],
        stats: CallStats,
        options: Mapping[str, Any] | None,
    ) -> list[dict[str, Any]]:
        """Return the results in order.

        Samples with a transient failure are retried after the pauses of `teacher.retry.backoff_s`,
        for example while the judge's LLM restarts.
        Raises ScorekitError after `FAILURES_IN_A_ROW` failed requests."""
        results: list[dict[str, Any] | None] = [None] * len(samples)
        missing = list(range(len(samples)))
        for pause in (0.0, *self.cfg.teacher.retry.backoff_s):
            await asyncio.sleep(pause)
            started = time.monotonic()
            pending = [samples[i] for i in missing]
            if client is self._metricx and self._coalescing:
                answers = await self._coalescing.score(pending)
            else:
                answers = await client.score(pending, options, priority="bulk")
            stats.requests += 1
            stats.samples += len(pending)
            stats.seconds += time.monotonic() - started
            for index, answer in zip(missing, answers, strict=True):
                results[index] = answer.model_dump()
            missing = [i for i in missing if _is_transient(results[i])]
            if not missing:
                break
        complete = [r for r in results if r is not None]
        stats.failed += sum(not r["ok"] for r in complete)
        service = "MetricX" if client is self._metricx else "the judge"
        if len(missing) < len(complete):
            self._failing[service] = 0
        elif self._failed_again(service) and not await self._scorer_answers(
            client, service, samples[0], options
        ):
            error = complete[missing[0]]["error"]
            raise ScorekitError(
                f"{service} failed {FAILURES_IN_A_ROW} requests in a row; the last one: "
                f"{error['type']}: {error['message']}"
            )
        return complete

    async def _scorer_answers(
        self,
        client: ScoringClient,
        service: str,
        sample: Mapping[str, Any],
        options: Mapping[str, Any] | None,
    ) -> bool:
        """Return True if MetricX or the judge answers for easy texts that no cache has."""
        texts = {"src": EASY, "source_text": EASY}
        fresh = f"{EASY} {uuid4().hex}"
        texts |= {"mt": fresh, "candidate": fresh}
        easy = {key: texts.get(key, value) for key, value in sample.items()}
        (answer,) = await client.score([easy], options, priority="bulk")
        answers = not _is_transient(answer.model_dump())
        if answers:
            self._failing[service] = 0
        return answers


def asking(cfg: SynthConfig) -> Callable[[str], list[dict[str, str]]]:
    """Return a function from a text to the teacher's chat messages."""
    template, (source, target) = load_template(cfg.teacher.prompt), languages(cfg)
    fields = {
        "source_lang": language_name(source),
        "target_lang": language_name(target),
        "src_lang_code": source,
        "tgt_lang_code": target,
    }

    def messages(text: str) -> list[dict[str, str]]:
        text = neutral(text)  # a chat template's token in the text would end the turn
        return [
            {"role": "system", "content": TEACHER_SYSTEM},
            {"role": "user", "content": fill(template, {**fields, "text": text})},
        ]

    return messages


def judge_request(
    cfg: SynthConfig, pair: tuple[str, str], src: str, candidate: str, doubt: str = ""
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the judge's sample for a candidate, and the options of the request.

    pair: `languages` of the config.
    doubt: what a rule saw, sent only to a `doubt_task`."""
    judge = cfg.filters.llm_judge
    sample = {
        "task": "translation_filter",
        "source_lang": pair[0],
        "target_lang": pair[1],
        "source_text": src,
        "candidate": candidate,
    }
    if doubt and judge.doubt_task is not None:
        sample |= {"task": judge.doubt_task, "doubt": doubt}
    options = {"temperature": judge.temperature, "max_tokens": judge.max_tokens}
    return sample, options if judge.model is None else {**options, "model": judge.model}


def _keys(shared: Any, values: Sequence[Any]) -> list[bytes]:
    """Return the keys of answers that are requested together.

    Their first halves are equal: unordered keys would cost SQLite six times as many writes."""
    first = digest_of(shared)
    return [bytes.fromhex(first[:16] + digest_of([first, value])[:16]) for value in values]


def _key(content: Any) -> bytes:
    return bytes.fromhex(digest_of(content))


def _runs(indexes: Sequence[int], max_length: int) -> Iterator[range]:
    """Yield rising indexes as ranges of consecutive ones, each at most `max_length` long."""
    start = 0
    for position in range(1, len(indexes) + 1):
        is_end = (
            position == len(indexes)
            or indexes[position] != indexes[position - 1] + 1
            or position - start == max_length
        )
        if is_end:
            yield range(indexes[start], indexes[position - 1] + 1)
            start = position


def _is_transient(result: Mapping[str, Any] | None) -> bool:
    return result is not None and not result["ok"] and is_transient(result["error"])


#: Largest number of partial requests in flight; further calls are collected meanwhile.
FEW = 4


class CoalescingScorer:
    """Wraps a client's `score` for bulk calls without options.

    A request costs the driver 5 ms regardless of its size, and the prefilter has two samples per
    record. Calls do not wait for a full request while fewer than `FEW` requests are in flight.
    """

    def __init__(self, client: ScoringClient, size: int) -> None:
        """Wrap a client.

        size: samples of a full request.
        """
        self._client = client
        self._size = size
        self._waiting: list[tuple[Sequence[Mapping[str, Any]], asyncio.Future[Any]]] = []
        self._under_way: set[asyncio.Task[None]] = set()

    async def score(self, samples: Sequence[Mapping[str, Any]]) -> list[Result]:
        """Return the results in order. All calls of a merged request raise the client's error."""
        if len(samples) >= self._size:
            return await self._client.score(samples, priority="bulk")
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[list[Result]] = loop.create_future()
        self._waiting.append((samples, turn))
        loop.call_soon(self._start)  # after the other calls of this loop iteration
        return await turn

    def _start(self, _: Any = None) -> None:
        while self._waiting:
            self._waiting = [call for call in self._waiting if not call[1].cancelled()]
            total = count = 0
            for samples, _turn in self._waiting:
                if total + len(samples) > self._size:
                    break
                total, count = total + len(samples), count + 1
            if len(self._under_way) >= FEW and count == len(self._waiting):
                return
            batch, self._waiting = self._waiting[:count], self._waiting[count:]
            task = asyncio.get_running_loop().create_task(self._send(batch))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)
            task.add_done_callback(self._start)

    async def _send(self, batch: Sequence[tuple[Sequence[Any], asyncio.Future[Any]]]) -> None:
        samples = [sample for call_samples, _ in batch for sample in call_samples]
        try:
            results = await self._client.score(samples, priority="bulk")
        except Exception as error:
            for _, turn in batch:
                if not turn.done():
                    turn.set_exception(error)
            return
        start = 0
        for call_samples, turn in batch:
            if not turn.done():
                turn.set_result(results[start : start + len(call_samples)])
            start += len(call_samples)


def teacher_settings(cfg: SynthConfig) -> dict[str, Any]:
    """Return the settings of teacher requests. URLs, timeouts and concurrency do not matter."""
    generation, revision = cfg.teacher.generation, cfg.teacher.revision
    source, target = languages(cfg)
    return {
        "teacher": cfg.teacher.model,
        **({} if revision is None else {"revision": revision}),
        "prompt": load_template(cfg.teacher.prompt),
        "languages": [source, target],
        **({"own": [custom.name for custom in cfg.data.languages]} if cfg.data.languages else {}),
        "seed": cfg.run.seed if generation.seed is None else generation.seed,
        "top_p": generation.top_p,
        "max_tokens": generation.max_tokens,
        "max_tokens_blob": generation.max_tokens_blob,
    }


def metricx_settings(cfg: SynthConfig) -> dict[str, Any]:
    """Return the settings of scores."""
    return {"metricx": cfg.metricx.checkpoint}
