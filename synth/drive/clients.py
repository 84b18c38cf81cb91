"""What a stage asks: teacher, MetricX, judge. Nobody is asked for an answer that is kept."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from scorekit.client import ScoringClient
from scorekit.errors import ScorekitError, ServiceUnreachable, may_pass_later
from scorekit.languages import language_name
from scorekit.prompts import TEACHER_SYSTEM, fill, load_template
from scorekit.text.chatmarks import neutral, restored
from synth.config import SynthConfig, languages
from synth.drive.together import Together
from synth.folder.answers import Answers
from synth.folder.stats import CallStats, StageStats
from synth.folder.store import Record, digest_of
from synth.record import NotYet, SourceFailed

if TYPE_CHECKING:
    from scorekit.llm import Choice, LLMClient, LLMError, Sampling

#: Candidates in one request at most: what is lost when it is cut off, and asked again.
PART = 32
#: Requests in a row that a service fails after all pauses: where it fails an easy one, too, it is
#: not the texts, and the run stops.
FAILURES_IN_A_ROW = 10
#: A text that whoever is there can translate, score and judge.
EASY = "Good morning."


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the teacher is asked, but for the seed; top_k, min_p, penalties are always neutral."""

    messages: list[dict[str, str]]
    max_tokens: int
    temperature: float
    top_p: float

    def sampling(self, seed: int) -> Sampling:
        """As the client takes it."""
        from scorekit.llm import Sampling

        return Sampling(
            max_tokens=self.max_tokens, temperature=self.temperature, top_p=self.top_p, seed=seed
        )


@dataclass(frozen=True, slots=True)
class Score:
    """A score of MetricX, or the type of the failure. Never both, never a number for a failure."""

    value: float | None
    error: str | None = None


class Clients:
    """The services of one stage, and the answers that they have given."""

    def __init__(
        self,
        cfg: SynthConfig,
        stats: StageStats,
        answers: Answers,
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
        self._together = metricx and Together(metricx, cfg.metricx.batch_size)
        self._identities = dict(identities or {})
        self._give_up = give_up
        self._failing: Counter[str] = Counter()
        self._messages = asking(cfg)
        self.languages = languages(cfg)
        seed = cfg.teacher.generation.seed
        self.seed = cfg.run.seed if seed is None else seed

    @property
    def window(self) -> int:
        """Records in work at once: enough to keep every request in flight, and little more."""
        return max(64, 2 * self.cfg.teacher.max_concurrency)

    @property
    def judge_understands(self) -> bool:
        """Whether a judge is asked that reads meaning: the back end `rules` sees no more than the
        rules of synthesis."""
        judge = self._identities.get("judge") or {}
        return self._judge is not None and judge.get("model") != "rules"

    async def translate(
        self, record: Record, *, temperature: float, n: int, seed: int
    ) -> list[dict[str, Any]]:
        """n translations of a source: {"index", "text", "finish_reason"}, candidate i with seed+i.

        Each candidate is kept under a key of its own: of 256 whose first 128 were asked for once,
        128 are asked for. Raises SourceFailed where this source can have none, NotYet where the
        teacher failed.
        """
        generation = self.cfg.teacher.generation
        blob = record["source_type"] == "blob"
        limit = generation.max_tokens_blob if blob else generation.max_tokens
        asked = _Asked(self._messages(record["source_text"]), limit, temperature, generation.top_p)
        teacher = self.cfg.teacher
        keys = _keys(
            ["teacher", teacher.model, teacher.revision, asdict(asked)],
            [seed + index if temperature else None for index in range(n)],  # greedy knows no seed
        )
        found = dict(await self._answers.get(keys))
        self.stats.answers_kept += len(found)
        per_call = self.cfg.final_generation.strategy == "per_call"
        step = 1 if per_call else min(PART, self.cfg.teacher.max_sequences or PART)
        missing = [index for index in range(n) if keys[index] not in found]
        for part in _runs(missing, step):
            found |= await self._chat(asked, seed, part, keys)
        src = record["source_text"]
        return [
            {"index": index, **found[key], "text": restored(src, found[key]["text"])}
            for index, key in enumerate(keys)
        ]

    async def _chat(
        self, asked: _Asked, seed: int, part: range, keys: Sequence[str]
    ) -> dict[str, dict[str, Any]]:
        """Candidates `part` by key, each kept when it has come, whatever becomes of the others."""
        from scorekit.llm import LLMError

        assert self._teacher is not None
        answers: dict[str, dict[str, Any]] = {}

        async def keep(choices: Sequence[Choice]) -> None:
            self._failing["the teacher"] = 0
            came = [(keys[part.start + c.index], c.text, c.finish_reason) for c in choices]
            told = {key: {"text": text, "finish_reason": reason} for key, text, reason in came}
            await self._answers.put(told)
            answers.update(told)

        try:
            await self._teacher.chat(
                asked.messages,
                asked.sampling(seed + part.start),
                n=len(part),
                request_id=keys[part.start],
                keep=keep,
            )
        except LLMError as error:
            raise await self._teacher_failed(error, asked, len(part)) from None
        return answers

    async def _teacher_failed(self, error: LLMError, asked: _Asked, n: int) -> ScorekitError:
        """What to raise: one source that a server cannot bear must not stop all others, and
        servers that answer nobody must not use up the sources. It is not kept, for it may depend on
        how the server was started: where the source is asked for again, so is the teacher."""
        assert self._teacher is not None
        if error.type == "overlong":
            return SourceFailed("teacher_overlong", str(error)[:300])
        in_a_row = self._failed_again("the teacher")
        if (in_a_row or error.server_is_away) and not await self._teacher_answers(asked, n):
            if error.server_is_away:
                return ServiceUnreachable(self._teacher.base_url, f"the teacher: {error}")
            return ScorekitError(
                f"the teacher failed {FAILURES_IN_A_ROW} requests in a row; the last one: {error}"
            )
        code, told = f"teacher_{error.type}", str(error)[:300]
        if self._give_up or error.type == "refused":
            return SourceFailed(code, told)
        return NotYet(code, told, error.status)

    async def _teacher_answers(self, asked: _Asked, n: int) -> bool:
        """Whether the teacher answers the same request with an easy text: then what failed lies
        with the texts. What is left of a shard may be nothing but such sources."""
        from scorekit.llm import LLMError

        assert self._teacher is not None
        easy = self._messages(EASY)
        try:
            async with asyncio.timeout(self.cfg.teacher.request_timeout_s):
                await self._teacher.chat(easy, asked.sampling(1), n=n, request_id=digest_of(easy))
        except (LLMError, TimeoutError):
            return False
        self._failing["the teacher"] = 0
        return True

    def _failed_again(self, service: str) -> bool:
        """Count a request that came to nothing; whether there are too many in a row."""
        self._failing[service] += 1
        return self._failing[service] >= FAILURES_IN_A_ROW

    async def score(self, src: str, mts: Sequence[str]) -> list[Score]:
        """MetricX of each translation, by quality estimation (no reference). Raises NotYet."""
        assert self._metricx is not None
        identity = self._identities.get("metricx")
        keys = _keys(["metricx", identity, src], mts)
        found = dict(await self._answers.get(keys))
        self.stats.answers_kept += len(found)
        missing = {key: mt for key, mt in zip(keys, mts, strict=True) if key not in found}
        if missing:
            samples = [{"src": src, "mt": mt} for mt in missing.values()]
            results = await self._ask(self._metricx, samples, self.stats.metricx, None)
            told = {
                key: {"score": r["score"]} if r["ok"] else {"error": r["error"]["type"]}
                for key, r in zip(missing, results, strict=True)
            }
            await self._keep(told, results, "the score of a translation")
            found |= told
        return [Score(found[key].get("score"), found[key].get("error")) for key in keys]

    async def judge(self, src: str, candidate: str, doubt: str = "") -> dict[str, Any]:
        """The verdict of the judge {"pass", "reason_code", "notes"}, or {"error": type, ...}.
        doubt: as `judge_request` takes it. Raises NotYet, unless a missing verdict lets pass."""
        assert self._judge is not None
        sample, options = judge_request(self.cfg, self.languages, src, candidate, doubt)
        key = digest_of(["judge", self._identities.get("judge"), options, sample])
        found = dict(await self._answers.get([key]))
        self.stats.answers_kept += len(found)
        if not found:
            results = await self._ask(self._judge, [sample], self.stats.judge, options)
            (result,) = results
            found = {key: result["verdict"] if result["ok"] else {"error": result["error"]["type"]}}
            lenient = self.cfg.filters.llm_judge.fail_policy == "permissive"
            await self._keep(found, results, "a verdict", lenient=lenient)
        verdict: dict[str, Any] = found[key]
        return verdict

    async def _keep(
        self,
        told: Mapping[str, Any],
        results: Sequence[Mapping[str, Any]],
        what: str,
        *,
        lenient: bool = False,
    ) -> None:
        """Keep what is an answer; raise NotYet where one is missing that may still come."""
        open_ = [r for r in results if _may_come(r)]
        good = {
            key: answer
            for (key, answer), r in zip(told.items(), results, strict=True)
            if not _may_come(r)
        }
        if good:
            await self._answers.put(good)
        if open_ and not (lenient or self._give_up):
            kind = open_[0]["error"]["type"]
            service = "score" if "score" in what else "judge"
            raise NotYet(f"{service}_{kind}", f"{what} did not come: {kind}")

    async def _ask(
        self,
        client: ScoringClient,
        samples: list[dict[str, Any]],
        stats: CallStats,
        options: Mapping[str, Any] | None,
    ) -> list[dict[str, Any]]:
        """Results in order. Samples that the service, not their text, failed are asked again after
        the pauses of `teacher.retry.backoff_s`: a judge is there while its LLM is started anew.

        Raises ScorekitError where `FAILURES_IN_A_ROW` requests came to nothing."""
        results: list[dict[str, Any] | None] = [None] * len(samples)
        missing = list(range(len(samples)))
        for pause in (0.0, *self.cfg.teacher.retry.backoff_s):
            await asyncio.sleep(pause)
            started = time.monotonic()
            asked = [samples[i] for i in missing]
            if client is self._metricx and self._together:
                answers = await self._together.score(asked)
            else:
                answers = await client.score(asked, options, priority="bulk")
            stats.requests += 1
            stats.samples += len(asked)
            stats.seconds += time.monotonic() - started
            for index, answer in zip(missing, answers, strict=True):
                results[index] = answer.model_dump()
            missing = [i for i in missing if _may_come(results[i])]
            if not missing:
                break
        found = [r for r in results if r is not None]
        stats.failed += sum(not r["ok"] for r in found)
        service = "MetricX" if client is self._metricx else "the judge"
        if len(missing) < len(found):
            self._failing[service] = 0
        elif self._failed_again(service) and not await self._scorer_answers(
            client, service, samples[0], options
        ):
            error = found[missing[0]]["error"]
            raise ScorekitError(
                f"{service} failed {FAILURES_IN_A_ROW} requests in a row; the last one: "
                f"{error['type']}: {error['message']}"
            )
        return found

    async def _scorer_answers(
        self,
        client: ScoringClient,
        service: str,
        sample: Mapping[str, Any],
        options: Mapping[str, Any] | None,
    ) -> bool:
        """Whether MetricX or the judge answers for easy texts, which no cache knows."""
        texts = {"src": EASY, "source_text": EASY}
        fresh = f"{EASY} {uuid4().hex}"
        texts |= {"mt": fresh, "candidate": fresh}
        easy = {key: texts.get(key, value) for key, value in sample.items()}
        (answer,) = await client.score([easy], options, priority="bulk")
        answers = not _may_come(answer.model_dump())
        if answers:
            self._failing[service] = 0
        return answers


def asking(cfg: SynthConfig) -> Callable[[str], list[dict[str, str]]]:
    """How the teacher is asked for the translation of a text: as the messages of a chat."""
    template, (source, target) = load_template(cfg.teacher.prompt), languages(cfg)
    fields = {
        "source_lang": language_name(source),
        "target_lang": language_name(target),
        "src_lang_code": source,
        "tgt_lang_code": target,
    }

    def messages(text: str) -> list[dict[str, str]]:
        text = neutral(text)  # or a token of a chat template in it would end the turn
        return [
            {"role": "system", "content": TEACHER_SYSTEM},
            {"role": "user", "content": fill(template, {**fields, "text": text})},
        ]

    return messages


def judge_request(
    cfg: SynthConfig, pair: tuple[str, str], src: str, candidate: str, doubt: str = ""
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A candidate as the judge is asked about it: the sample, and the options of the request.

    pair: `languages` of the config. doubt: what a rule saw; `doubt_task` is told, where there is
    one."""
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


def _keys(shared: Any, own: Sequence[Any]) -> list[str]:
    """Keys of answers that are asked for together. Their first halves are equal, so that SQLite
    keeps them side by side: keys without order cost six times the writing."""
    first = digest_of(shared)
    return [first[:16] + digest_of([first, each])[:16] for each in own]


def _runs(indexes: Sequence[int], most: int) -> Iterator[range]:
    """The indexes, which rise, as ranges of neighbours, each of `most` at most."""
    start = 0
    for at in range(1, len(indexes) + 1):
        ends = at == len(indexes) or indexes[at] != indexes[at - 1] + 1 or at - start == most
        if ends:
            yield range(indexes[start], indexes[at - 1] + 1)
            start = at


def _may_come(result: Mapping[str, Any] | None) -> bool:
    return result is not None and not result["ok"] and may_pass_later(result["error"])
