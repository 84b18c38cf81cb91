"""What a stage asks: teacher, MetricX, judge; each answer is journaled under its request."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from scorekit.client import ScoringClient
from scorekit.errors import ScorekitError, ServiceUnreachable, UserError
from scorekit.languages import find_language
from scorekit.prompts import TEACHER_SYSTEM, fill, load_template
from scorekit.schemas import Info
from synth.config import SynthConfig, languages
from synth.stats import CallStats, StageStats, scorer_figures
from synth.store import Journal, Record, StageFolder, digest_of, to_line, write_atomic

if TYPE_CHECKING:
    from scorekit.llm import LLMClient, LLMError, Sampling

#: Candidates in one request at most: what is lost when it is cut off, and asked again.
PART = 32
#: Requests in a row that a service fails after all pauses: it is not the texts, the run stops.
FAILURES_IN_A_ROW = 10
#: What makes a service another one, whose answers are not to be mixed.
_IDENTITY = ("model", "revision", "tokenizer", "dtype", "max_input_length")


class SourceFailed(ScorekitError):
    """The teacher can give no answer to this source, whenever it is asked."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Score:
    """A score of MetricX, or the type of the failure. Never both, never a number for a failure."""

    value: float | None
    error: str | None = None


class Tools:
    """The services of one stage, with the journal of one shard."""

    def __init__(
        self, cfg: SynthConfig, stats: StageStats, teacher: LLMClient | None,
        metricx: ScoringClient | None, judge: ScoringClient | None,
    ) -> None:  # fmt: skip
        self.cfg = cfg
        self.stats = stats
        self._teacher, self._metricx, self._judge = teacher, metricx, judge
        self._journal: Journal | None = None
        self._failing: Counter[str] = Counter()
        self._template = load_template(cfg.teacher.prompt)
        source, target = languages(cfg)
        self._fields = {
            "source_lang": _name(source), "target_lang": _name(target),
            "src_lang_code": source, "tgt_lang_code": target,
        }  # fmt: skip
        self.languages = (source, target)
        seed = cfg.teacher.generation.seed
        self.seed = cfg.run.seed if seed is None else seed

    @property
    def window(self) -> int:
        """Records in work at once: enough to keep every request in flight, and little more."""
        return max(64, 2 * self.cfg.teacher.max_concurrency)

    def with_journal(self, journal: Journal) -> Tools:
        """The same services, with another journal."""
        tools = Tools(self.cfg, self.stats, self._teacher, self._metricx, self._judge)
        tools._journal, tools._failing = journal, self._failing
        return tools

    @classmethod
    @asynccontextmanager
    async def open(
        cls, cfg: SynthConfig, uses: frozenset[str], folder: StageFolder, stats: StageStats
    ) -> AsyncIterator[Tools]:
        """Connect and check what is there against the config, before anything is spent; and
        against what the stage, if it is resumed, was begun with. Raises UserError."""
        async with AsyncExitStack() as stack:
            teacher = metricx = judge = None
            before: dict[str, float] = {}
            if "teacher" in uses:
                teacher = await stack.enter_async_context(open_teacher(cfg))
                stats.teacher = teacher.counts  # they go on counting
                await teacher.check()
            if "metricx" in uses:
                cache_db = cfg.metricx.cache_db
                metricx = await stack.enter_async_context(
                    ScoringClient(
                        cfg.metricx.url, batch_size=cfg.metricx.batch_size, max_in_flight=16,
                        cache_db=cache_db, retry_samples=False,  # `_ask` does
                    )
                )  # fmt: skip
                info = await _info(metricx, "metricx")
                check_metricx(cfg, info)
                _note_service(folder, "metricx", info)
                before = await asyncio.to_thread(scorer_figures, cfg.metricx.url, {})
            if "judge" in uses:
                judge = await stack.enter_async_context(
                    ScoringClient(
                        cfg.filters.llm_judge.url, batch_size=16, max_in_flight=16,
                        retry_samples=False,
                    )
                )  # fmt: skip
                info = await _info(judge, "judge")
                check_judge(cfg, info)
                _note_service(folder, "judge", info)
            try:
                yield cls(cfg, stats, teacher, metricx, judge)
            finally:
                if metricx is not None:
                    stats.scorer = await asyncio.to_thread(scorer_figures, cfg.metricx.url, before)

    async def translate(
        self, record: Record, *, temperature: float, n: int, seed: int
    ) -> list[dict[str, Any]]:
        """n translations of a source: {"index", "text", "finish_reason"}, candidate i with seed+i.

        Raises SourceFailed where this source can have none.
        """
        from scorekit.llm import Sampling

        generation = self.cfg.teacher.generation
        blob = record["source_type"] == "blob"
        limit = generation.max_tokens_blob if blob else generation.max_tokens
        messages = self._messages(record["source_text"])
        found: list[dict[str, Any]] = []
        per_call = self.cfg.final_generation.strategy == "per_call"
        step = 1 if per_call else min(PART, self.cfg.teacher.max_sequences or PART)
        for start in range(0, n, step):
            count = min(step, n - start)
            sampling = Sampling(
                max_tokens=limit, temperature=temperature, top_p=generation.top_p,
                seed=seed + start,
            )  # fmt: skip
            for choice in await self._chat(messages, sampling, count):
                found.append({**choice, "index": start + choice["index"]})
        return found

    async def _chat(
        self, messages: Sequence[Mapping[str, str]], sampling: Sampling, n: int
    ) -> list[dict[str, Any]]:
        from scorekit.llm import LLMError

        assert self._teacher is not None
        key = digest_of([self.cfg.teacher.model, messages, asdict(sampling), n])
        answer = self._recall(key)
        if answer is None:
            try:
                choices = await self._teacher.chat(messages, sampling, n=n, request_id=key)
            except LLMError as error:
                if error.type != "overlong":
                    raise self._teacher_failed(error) from None
                answer = {"failed": error.type, "message": str(error)[:300]}
            else:
                self._failing["the teacher"] = 0
                answer = [
                    {"index": c.index, "text": c.text, "finish_reason": c.finish_reason}
                    for c in choices
                ]
            self._note(key, answer)
        if isinstance(answer, dict):
            raise SourceFailed(f"teacher_{answer['failed']}", answer["message"])
        found: list[dict[str, Any]] = answer
        return found

    def _teacher_failed(self, error: LLMError) -> ScorekitError:
        """What to raise: one source that a server cannot bear must not stop all others, and
        servers that answer nobody must not use up the sources. It is not kept: on --resume the
        source is asked again."""
        if error.server_is_away:
            assert self._teacher is not None
            return ServiceUnreachable(self._teacher.base_url, f"the teacher: {error}")
        if self._failed_again("the teacher"):
            return ScorekitError(
                f"the teacher failed {FAILURES_IN_A_ROW} requests in a row; the last one: {error}"
            )
        return SourceFailed(f"teacher_{error.type}", str(error)[:300])

    def _failed_again(self, service: str) -> bool:
        """Count a request that came to nothing; whether there are too many in a row."""
        self._failing[service] += 1
        return self._failing[service] >= FAILURES_IN_A_ROW

    async def score(self, src: str, mts: Sequence[str]) -> list[Score]:
        """MetricX of each translation, by quality estimation (no reference)."""
        assert self._metricx is not None
        key = digest_of(["metricx", self.cfg.metricx.checkpoint, src, list(mts)])
        answer = self._recall(key)
        if answer is None:
            samples = [{"src": src, "mt": mt} for mt in mts]
            results = await self._ask(self._metricx, samples, self.stats.metricx, None)
            answer = [r["score"] if r["ok"] else r["error"]["type"] for r in results]
            if not any(map(_may_come, results)):
                self._note(key, answer)
        return [Score(None, a) if isinstance(a, str) else Score(a) for a in answer]

    async def judge(self, src: str, candidate: str) -> dict[str, Any]:
        """The verdict of the judge {"pass", "reason_code", "notes"}, or {"error": type, ...}."""
        assert self._judge is not None
        judge = self.cfg.filters.llm_judge
        sample = {
            "task": "translation_filter", "source_lang": self._fields["source_lang"],
            "target_lang": self._fields["target_lang"], "source_text": src, "candidate": candidate,
        }  # fmt: skip
        options = {"temperature": judge.temperature, "max_tokens": judge.max_tokens}
        if judge.model is not None:
            options["model"] = judge.model  # type: ignore[assignment]
        key = digest_of(["judge", options, sample])
        answer = self._recall(key)
        if answer is None:
            (result,) = await self._ask(self._judge, [sample], self.stats.judge, options)
            answer = result["verdict"] if result["ok"] else {"error": result["error"]["type"]}
            if not _may_come(result):
                self._note(key, answer)
        verdict: dict[str, Any] = answer
        return verdict

    async def _ask(
        self, client: ScoringClient, samples: list[dict[str, Any]], stats: CallStats,
        options: Mapping[str, Any] | None,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Results in order. Samples that the service, not their text, failed are asked again after
        the pauses of `teacher.retry.backoff_s`: a judge is there while its LLM is started anew.

        Raises ScorekitError where `FAILURES_IN_A_ROW` requests came to nothing."""
        results: list[dict[str, Any] | None] = [None] * len(samples)
        missing = list(range(len(samples)))
        for pause in (0.0, *self.cfg.teacher.retry.backoff_s):
            await asyncio.sleep(pause)
            started = time.monotonic()
            asked = [samples[i] for i in missing]
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
        elif self._failed_again(service):
            error = found[missing[0]]["error"]
            raise ScorekitError(
                f"{service} failed {FAILURES_IN_A_ROW} requests in a row; the last one: "
                f"{error['type']}: {error['message']}"
            )
        return found

    def _messages(self, text: str) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": TEACHER_SYSTEM},
            {"role": "user", "content": fill(self._template, {**self._fields, "text": text})},
        ]

    def _recall(self, key: str) -> Any:
        assert self._journal is not None
        return self._journal.get(key)

    def _note(self, key: str, answer: Any) -> None:
        assert self._journal is not None
        self._journal.put(key, answer)


def open_teacher(cfg: SynthConfig) -> LLMClient:
    """The client of the teacher; its key comes from the environment."""
    from scorekit.llm import LLMClient

    teacher = cfg.teacher
    key = os.environ.get(teacher.api_key_env)
    return LLMClient(
        teacher.base_url, teacher.model,
        api_key=SecretStr(key) if key else None,
        request_timeout_s=teacher.request_timeout_s,
        connect_timeout_s=teacher.connect_timeout_s,
        max_concurrency=teacher.max_concurrency,
        max_sequences=teacher.max_sequences,
        max_attempts=teacher.retry.max_attempts,
        backoff_s=tuple(teacher.retry.backoff_s),
        requests_per_minute=teacher.requests_per_minute,
        strategy=cfg.final_generation.strategy,
        wait_for_server_s=teacher.wait_for_server_s,
    )  # fmt: skip


def check_metricx(cfg: SynthConfig, info: Info) -> None:
    """The service must be what the config expects. Raises UserError."""
    told = cfg.metricx
    if Path(told.checkpoint).name != Path(info.model).name:
        raise UserError(f"metricx.checkpoint is {told.checkpoint}, the service has {info.model}")
    if told.device is not None and not info.device.startswith(told.device):
        raise UserError(f"metricx.device is {told.device}, the service runs on {info.device}")


def check_judge(cfg: SynthConfig, info: Info) -> None:
    """Rules ask no model. Raises UserError where the config names one."""
    model = cfg.filters.llm_judge.model
    if info.model == "rules" and model not in (None, "rules"):
        raise UserError(
            f"filters.llm_judge.model is {model}, but the judge at {cfg.filters.llm_judge.url} is "
            "the rules back end: start it with --backend openai, or leave the model out"
        )


async def _info(client: ScoringClient, name: str) -> Info:
    try:
        await client.wait_ready(60.0)
        return await client.info()
    except ServiceUnreachable as error:
        raise UserError(f"{name}: {error}; start it, or give {name}'s url") from None


def _note_service(folder: StageFolder, name: str, info: Info) -> None:
    """Keep what the service says of itself, for the stage and for the run. Raises UserError where
    the stage was begun with another one: half of its answers would be of that."""
    told = info.model_dump()
    path = folder.service(name)
    if path.exists():
        before = json.loads(path.read_bytes())
        changed = [key for key in _IDENTITY if before.get(key) != told[key]]
        if changed:
            key = changed[0]
            raise UserError(
                f"{folder.path}: the {name} service's {key} was {before.get(key)}, is {told[key]}; "
                "start the same one again, or give --overwrite"
            )
    else:
        folder.path.mkdir(parents=True, exist_ok=True)
        write_atomic(path, to_line(told))
    write_atomic(folder.out_dir / f"service-{name}.json", to_line(told))


def _may_come(result: Mapping[str, Any] | None) -> bool:
    return result is not None and not result["ok"] and result["error"]["retryable"]


def _name(tag: str) -> str:
    language = find_language(tag)
    return tag if language is None else language.name
