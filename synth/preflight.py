"""Check everything that a run needs before it starts or clears anything.

`check` prints the results, and `run` begins with the same checks. The first lines
of 100 local corpus files at most are read; those of the hub are only listed. Only the services of
the pending stages are called:

- the teacher: its list of models, and one chat of one token;
- each MetricX: its info;
- each judge: its info, and one verdict on one sentence, which its LLM is paid for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from scorekit.client import ScoringClient
from scorekit.client.replicas import check_agreement, check_service
from scorekit.errors import UserError
from scorekit.llm import Sampling
from scorekit.net.addresses import address_of
from scorekit.paid.store import open_store
from scorekit.prompts import load_template
from scorekit.report.findings import Findings
from scorekit.schemas import Failed, Info
from synth.config import ANSWERS, SynthConfig, answers_place, languages, pair_configs
from synth.execution.clients import EASY, asking, judge_request
from synth.execution.cluster import connect, on_a_node
from synth.execution.services import (
    JUDGE_URL,
    METRICX_URL,
    READY_S,
    OutageReporter,
    check_judge,
    check_metricx,
    is_known,
    open_teacher,
    service_info,
    watching,
)
from synth.execution.stage import MapStage, Stage
from synth.execution.stage_start import continued_manifest, requested_manifest
from synth.location import check_claim
from synth.reasons import Reason
from synth.run import RunOptions, run_folder, run_folders
from synth.sources.madlad import SourceFile, read_documents, source_files
from synth.sources.measure import make_measure
from synth.sources.segment import mode_code
from synth.stages.sample_sources import SampleSources
from synth.stages.table import BY_NAME
from synth.storage.store import StageFolder, digest_of

PrintLine = Callable[[str], None]
#: Number of corpus files that are read before a run, and of the first lines of each.
_HEADS, _HEAD_LINES = 100, 20


@dataclass(frozen=True, slots=True)
class _PendingRun:
    """The pending stages of one pair.

    resumed: folders of stages to resume, with known services.
    """

    cfg: SynthConfig
    stages: tuple[Stage, ...]
    resumed: tuple[StageFolder, ...]

    @property
    def uses(self) -> frozenset[str]:
        """Return the services that these stages call."""
        maps = [stage for stage in self.stages if isinstance(stage, MapStage)]
        return frozenset().union(*(stage.uses(self.cfg) for stage in maps))


def need_passing(cfg: SynthConfig, options: RunOptions, print_line: PrintLine) -> None:
    """Check what a run needs, and report the results.

    It waits for a service that is down, unless another check fails. Raises UserError with a line
    for each error."""
    findings = check_run(cfg, options, should_wait=True, print_line=print_line)
    if findings.failed:
        # Errors of a stage begin with the path of its folder, which is clear enough.
        first, *other_errors = (error.removeprefix("stages: ") for error in findings.errors)
        raise UserError(first, [f"error: {error}" for error in other_errors])
    for check in findings.checks:
        if check.name in _SERVICE_CHECKS:
            print_line(f"{check.name}: {check.result}")


def check_run(
    cfg: SynthConfig,
    options: RunOptions,
    *,
    should_wait: bool = False,
    print_line: PrintLine = lambda line: None,
) -> Findings:
    """Check everything that a run needs; nothing is written.

    should_wait: wait for services.
    """
    findings = Findings()
    runs: list[_PendingRun] = []
    for name, pair_cfg in pair_configs(cfg).items():
        _look_at_files(findings, f"{name}: " if name else "", pair_cfg, options, runs)
    if options.engine == "ray":
        findings.run_check("ray", _ray, cfg)
    uses = frozenset().union(*(run.uses for run in runs))
    if uses:
        findings.run_check("run.answers", _answers, cfg)
    if uses and not (should_wait and findings.failed):
        first = next(run.cfg for run in runs if run.uses)
        resumed = [folder for run in runs for folder in run.resumed]
        _look_at_services(findings, first, uses, resumed, options, should_wait, print_line)
    return findings


def _look_at_files(
    findings: Findings, pair: str, cfg: SynthConfig, options: RunOptions, runs: list[_PendingRun]
) -> None:
    """Check a pair's files, and append its pending stages to `runs`.

    pair: prefix of the checks' names, or empty."""
    check = findings.run_check
    has_prompt = check(f"{pair}teacher.prompt", _prompt, cfg)
    has_place = check(f"{pair}run.out_dir", _out_dir, cfg, options)
    if not (has_prompt and has_place):  # the stages would repeat the same error
        return
    coming = check(f"{pair}stages", _pending_run, cfg, options)
    if coming is None:
        return
    runs.append(coming)
    if any(isinstance(stage, SampleSources) for stage in coming.stages):
        check(f"{pair}data.files", _corpus, cfg)
        if cfg.bucketing.measure == "tokenizer":
            check(f"{pair}bucketing.tokenizer", _tokenizer, cfg)


def _prompt(cfg: SynthConfig) -> tuple[bool, str]:
    load_template(cfg.teacher.prompt)
    return True, str(cfg.teacher.prompt)


def _out_dir(cfg: SynthConfig, options: RunOptions) -> tuple[bool, str]:
    folder = run_folder(cfg, options)
    check_claim(folder)
    return True, f"{folder}: can be written to"


def _pending_run(cfg: SynthConfig, options: RunOptions) -> tuple[_PendingRun, str]:
    """Return the unfinished or repeated stages.

    Raises UserError for invalid inputs, for example a missing evaluation set or a damaged folder,
    and for output that was begun with other settings."""
    out_dirs = run_folders(cfg, options)
    out_dir = out_dirs[0]
    repeats = options.overwrite or options.repair is not None
    for name in options.stages:
        stage = BY_NAME[name]
        is_first = name == options.stages[0]
        if not is_first and (repeats or not _has_input(stage, out_dirs)):
            stage.settings(cfg)
            continue
        requested = requested_manifest(stage, cfg, out_dirs, options.limit)
        if not repeats:
            folder = StageFolder(out_dir, name)
            continued_manifest(folder, requested, options.share, resume=options.resume)
    stages = tuple(
        BY_NAME[name] for name in options.stages if repeats or not StageFolder(out_dir, name).done()
    )
    resumed = () if options.overwrite else tuple(StageFolder(out_dir, s.name) for s in stages)
    return _PendingRun(cfg, stages, resumed), ", ".join(s.name for s in stages) or "all are done"


def _has_input(stage: Stage, out_dirs: tuple[Path, ...]) -> bool:
    """Return whether the stage before has made its output; if not, it runs first."""
    try:
        return stage.after is None or stage.input_of(out_dirs) is not None
    except UserError:
        return False


def _corpus(cfg: SynthConfig) -> tuple[None, str]:
    """List the files, and read the first lines of local ones.

    Raises UserError if more files begin with no document than data.max_unreadable allows."""
    files = source_files(cfg.data)
    local = [file for file in files if "://" not in file.url]
    heads = local[:: -(-len(local) // _HEADS) or 1]
    problems = [problem for file in heads if (problem := _problem_of_head(file, cfg))]
    if problems and (
        len(problems) == len(files) or len(problems) > cfg.data.max_unreadable * len(heads)
    ):
        raise UserError(
            f"data.files: {problems[0]}. A corpus is .jsonl, an object with `text` a line, or "
            ".txt, a text a line; each also as .gz"
        )
    return None, f"{len(files):,} files, the first: {files[0].name}"


def _problem_of_head(file: SourceFile, cfg: SynthConfig) -> str | None:
    """Return why no document is among the first lines of a file, or None if there is one."""
    problems: list[str] = []

    def note(line: int, code: Reason, reason: str) -> None:
        problems.append(f"{file.name} line {line}: {reason}")
        if len(problems) == _HEAD_LINES:
            raise _HeadRead

    with suppress(_HeadRead):
        for document in read_documents(file, note):
            code = mode_code(document, cfg.segmentation.mode)
            if code is None:
                return None
            note(document.line, code, f"segmentation.mode {cfg.segmentation.mode}: {code}")
    return problems[0] if problems else f"{file.name}: it has no document"


class _HeadRead(Exception):
    """Raised to end the reading of a file after its first lines."""


def _tokenizer(cfg: SynthConfig) -> tuple[None, str]:
    make_measure(cfg.bucketing, cfg.data.src_lang)
    return None, f"{cfg.bucketing.tokenizer}: can be loaded"


def _ray(cfg: SynthConfig) -> tuple[None, str]:
    return None, f"a cluster of {connect(cfg)} machines"


def _answers(cfg: SynthConfig) -> tuple[None, str]:
    location = answers_place(cfg)
    if "://" not in location and not Path(location).exists():
        return None, f"{location}: a new file"

    async def read_one() -> None:
        answers = open_store(location, ANSWERS)
        try:
            await answers.get([bytes.fromhex(digest_of("preflight"))])
        finally:
            await answers.close()

    asyncio.run(read_one())
    return None, f"{location}: can be read"


# -- services --------------------------------------------------------------------------------------


def _look_at_services(
    findings: Findings,
    cfg: SynthConfig,
    uses: frozenset[str],
    resumed: Iterable[StageFolder],
    options: RunOptions,
    should_wait: bool,
    print_line: PrintLine,
) -> None:
    """Check all services concurrently; with Ray, from a node, because the driver calls no
    service."""
    answers: Mapping[str, tuple[dict[str, Info], str] | Exception]
    if options.engine == "ray":
        if any(not check.ok for check in findings.checks if check.name == "ray"):
            return
        answers = on_a_node(_ask_all, cfg.model_dump(mode="json"), uses, should_wait)
    else:
        answers = _ask_all(cfg, uses, should_wait, print_line)
    for name, answer in answers.items():
        findings.run_check(name, _check_answer, answer, name, resumed)


def _check_answer(
    answer: tuple[dict[str, Info], str] | Exception, name: str, resumed: Iterable[StageFolder]
) -> tuple[None, str]:
    if isinstance(answer, Exception):
        raise answer
    infos, message = answer
    for info in infos.values():
        for folder in resumed:
            is_known(folder, name, info)
    return None, message


def _ask_all(
    cfg: SynthConfig | dict[str, Any],
    uses: frozenset[str],
    should_wait: bool,
    print_line: PrintLine = lambda line: None,
) -> dict[str, tuple[dict[str, Info], str] | Exception]:
    """Return each service's info and a message, or the error."""
    parsed_cfg = cfg if isinstance(cfg, SynthConfig) else SynthConfig.model_validate(cfg)

    async def ask() -> list[Any]:
        with watching(print_line) as outages:
            checks = (_SERVICE_CHECKS[name](parsed_cfg, should_wait, outages) for name in names)
            return await asyncio.gather(*checks, return_exceptions=True)

    names = [name for name in _SERVICE_CHECKS if name in uses]
    return dict(zip(names, asyncio.run(ask()), strict=True))


async def _teacher(
    cfg: SynthConfig, should_wait: bool, outages: OutageReporter
) -> tuple[dict[str, Info], str]:
    """Check the teacher.

    Raises UserError if it is down, refuses the key, lacks the model or chats, or has a short
    context; LLMError for other failures."""
    teacher_cfg, generation = cfg.teacher, cfg.teacher.generation
    async with open_teacher(cfg, should_wait=should_wait) as teacher:
        patience_s = teacher_cfg.wait_for_server_s if should_wait else 0.0
        outages.watch_service(
            f"the teacher at {address_of(teacher_cfg.base_url)}", teacher, patience_s
        )
        context_length = await teacher.check()
        blobs = cfg.final_generation.blob.enabled
        key = "max_tokens_blob" if blobs else "max_tokens"
        longest = getattr(generation, key)
        if context_length is not None and longest >= context_length:
            raise UserError(
                f"teacher.generation.{key}: is {longest}, but a chat of "
                f"{teacher.base_url} has {context_length} tokens. Lower it, or "
                "start the server with a larger --max-model-len"
            )
        sampling = Sampling(max_tokens=1, temperature=0.0, top_p=generation.top_p)
        await teacher.chat(asking(cfg)(EASY), sampling, request_id=f"preflight-{uuid4().hex}")
        return {}, f"{teacher.base_url} serves {teacher_cfg.model}, and answers a chat"


async def _metricx(
    cfg: SynthConfig, should_wait: bool, outages: OutageReporter
) -> tuple[dict[str, Info], str]:
    """Check every MetricX. Raises UserError if one is down, unexpected, or differs from the
    others."""
    infos: dict[str, Info] = {}
    for url in _urls(cfg.metricx.url):
        async with ScoringClient(url) as client:
            address = address_of(url)
            outages.watch_service(f"MetricX at {address}", client, READY_S)
            infos[address] = await service_info(client, METRICX_URL, should_wait=should_wait)
        check_metricx(cfg, infos[address])
    check_agreement(METRICX_URL, infos)
    return infos, "; ".join(f"{url} has {info.model}" for url, info in infos.items())


async def _judge(
    cfg: SynthConfig, should_wait: bool, outages: OutageReporter
) -> tuple[dict[str, Info], str]:
    """Check every judge.

    Raises UserError if one is down, unexpected, or gives no verdict, for example because its LLM is
    down or refuses the key."""
    infos: dict[str, Info] = {}
    seconds = cfg.teacher.request_timeout_s
    for url in _urls(cfg.filters.llm_judge.url):
        async with ScoringClient(url, timeout_s=seconds, deadline_s=seconds) as client:
            address = address_of(url)
            outages.watch_service(f"the judge at {address}", client, READY_S)
            infos[address] = await service_info(client, JUDGE_URL, should_wait=should_wait)
            check_service(JUDGE_URL, address, infos[address], "judge")
            check_judge(cfg, infos[address])
            await _need_verdict(cfg, client, address, should_wait)
    check_agreement(JUDGE_URL, infos)
    return infos, "; ".join(f"{url} judges by {info.model}" for url, info in infos.items())


async def _need_verdict(
    cfg: SynthConfig, client: ScoringClient, url: str, should_wait: bool
) -> None:
    # A text that is in no cache.
    sample, options = judge_request(cfg, languages(cfg), EASY, f"{EASY} {uuid4().hex}")
    for pause in (0.0, *(cfg.teacher.retry.backoff_s if should_wait else ())):
        await asyncio.sleep(pause)
        (result,) = await client.score([sample], options)
        if not isinstance(result, Failed) or not result.error.retryable:
            break
    # One answer that does not fit the rubric is not an error of the service.
    if isinstance(result, Failed) and result.error.type != "model_failure":
        raise UserError(
            f"{JUDGE_URL}: {url} gives no verdict ({result.error.type}: {result.error.message}): "
            "check its LLM, its key and filters.llm_judge.model"
        )


def _urls(urls: str | list[str]) -> list[str]:
    return [urls] if isinstance(urls, str) else urls


_ServiceCheck = Callable[
    [SynthConfig, bool, OutageReporter], Coroutine[Any, Any, tuple[dict[str, Info], str]]
]
#: Name of a service -> its check.
_SERVICE_CHECKS: dict[str, _ServiceCheck] = {
    "teacher": _teacher,
    "metricx": _metricx,
    "judge": _judge,
}
