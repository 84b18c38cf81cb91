"""What is looked at before a run begins: what would otherwise show hours later, or after something
that is finished was cleared.

Of a teacher, MetricX and a judge those are asked that the coming stages need:

- the teacher: which models it serves, and one chat of one token;
- each MetricX: what it says of itself;
- each judge: the same, and one verdict on one sentence, which its LLM is paid for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from scorekit.client import ScoringClient
from scorekit.client.endpoints import check_agreement, check_service
from scorekit.errors import UserError
from scorekit.prompts import load_template
from scorekit.report.findings import Findings
from scorekit.schemas import Failed, Info
from synth.config import SynthConfig, answers_place, languages, pair_configs
from synth.context import Stage
from synth.drive.clients import EASY, asking, judge_request
from synth.drive.kinds import MapStage
from synth.drive.services import (
    JUDGE_URL,
    METRICX_URL,
    READY_S,
    Absences,
    check_judge,
    check_metricx,
    is_known,
    open_teacher,
    service_info,
    watching,
)
from synth.folder.answers import open_answers
from synth.folder.places import check_claim
from synth.folder.store import StageFolder, digest_of
from synth.run import RunOptions, run_folder
from synth.sources.madlad import source_files
from synth.stages.sample_sources import SampleSources
from synth.stages.table import BY_NAME

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Coming:
    """What is to run of one pair. begun: folders of stages that go on, whose services are known."""

    cfg: SynthConfig
    stages: tuple[Stage, ...]
    begun: tuple[StageFolder, ...]

    @property
    def uses(self) -> frozenset[str]:
        """Whom these stages ask."""
        maps = [stage for stage in self.stages if isinstance(stage, MapStage)]
        return frozenset().union(*(stage.uses(self.cfg) for stage in maps))


def need_passing(cfg: SynthConfig, options: RunOptions, tell: Tell) -> None:
    """Look at what a run needs, and say what was found. A service that is away is waited for, as in
    a stage, unless something else is at fault. Raises UserError with a line for each fault."""
    findings = look_at_run(cfg, options, patient=True, tell=tell)
    if findings.failed:
        # What is wrong with a stage begins with the path of its folder, which says enough.
        first, *others = (fault.removeprefix("stages: ") for fault in findings.faults)
        raise UserError(first, [f"error: {fault}" for fault in others])
    for check in findings.checks:
        if check.name in _ASKED:
            tell(f"{check.name}: {check.found}")


def look_at_run(
    cfg: SynthConfig, options: RunOptions, *, patient: bool = False, tell: Tell = lambda line: None
) -> Findings:
    """Look at everything that a run needs; nothing is written. patient: as `need_passing`."""
    findings = Findings()
    runs: list[_Coming] = []
    for name, one in pair_configs(cfg).items():
        _look_at_files(findings, f"{name}: " if name else "", one, options, runs)
    if options.engine == "ray":
        findings.look("ray", _ray, cfg)
    uses = frozenset().union(*(run.uses for run in runs))
    if uses:
        findings.look("run.answers", _answers, cfg)
    if uses and not (patient and findings.failed):
        first = next(run.cfg for run in runs if run.uses)
        begun = [folder for run in runs for folder in run.begun]
        _look_at_services(findings, first, uses, begun, options, patient, tell)
    return findings


def _look_at_files(
    findings: Findings, pair: str, cfg: SynthConfig, options: RunOptions, runs: list[_Coming]
) -> None:
    """What a pair needs of this machine; what is to run of it goes into `runs`. pair: its name, or
    empty, before those of the rows."""
    look = findings.look
    has_prompt = look(f"{pair}teacher.prompt", _prompt, cfg)
    has_place = look(f"{pair}run.out_dir", _place, cfg, options)
    if not (has_prompt and has_place):  # the stages would name the same fault again
        return
    coming = look(f"{pair}stages", _coming, cfg, options)
    if coming is None:
        return
    runs.append(coming)
    if any(isinstance(stage, SampleSources) for stage in coming.stages):
        look(f"{pair}data.files", _corpus, cfg)


def _prompt(cfg: SynthConfig) -> tuple[bool, str]:
    load_template(cfg.teacher.prompt)
    return True, str(cfg.teacher.prompt)


def _place(cfg: SynthConfig, options: RunOptions) -> tuple[bool, str]:
    folder = run_folder(cfg, options)
    check_claim(folder)
    return True, f"{folder}: can be written to"


def _coming(cfg: SynthConfig, options: RunOptions) -> tuple[_Coming, str]:
    """The stages that are not done, or are to be made again. Raises UserError for what they are
    made of: an evaluation set that is not there, a folder that is damaged."""
    out_dir = run_folder(cfg, options)
    again = options.overwrite or options.repair is not None
    stages = tuple(
        BY_NAME[name] for name in options.stages if again or not StageFolder(out_dir, name).done()
    )
    for stage in stages:
        stage.settings(cfg)
    begun = () if options.overwrite else tuple(StageFolder(out_dir, s.name) for s in stages)
    return _Coming(cfg, stages, begun), ", ".join(s.name for s in stages) or "all are done"


def _corpus(cfg: SynthConfig) -> tuple[None, str]:
    files = source_files(cfg.data)
    return None, f"{len(files):,} files, the first: {files[0].name}"


def _ray(cfg: SynthConfig) -> tuple[None, str]:
    from synth.drive.cluster import connect

    return None, f"a cluster of {connect(cfg)} machines"


def _answers(cfg: SynthConfig) -> tuple[None, str]:
    place = answers_place(cfg)
    if "://" not in place and not Path(place).exists():
        return None, f"{place}: a new file"

    async def look() -> None:
        answers = open_answers(place)
        try:
            await answers.get([digest_of("preflight")])
        finally:
            await answers.close()

    asyncio.run(look())
    return None, f"{place}: can be read"


# -- services --------------------------------------------------------------------------------------


def _look_at_services(
    findings: Findings,
    cfg: SynthConfig,
    uses: frozenset[str],
    begun: Iterable[StageFolder],
    options: RunOptions,
    patient: bool,
    tell: Tell,
) -> None:
    """Ask all at once. With Ray, from one of its nodes: the machine of the driver asks nobody."""
    found: Mapping[str, tuple[dict[str, Info], str] | Exception]
    if options.engine == "ray":
        from synth.drive.cluster import on_a_node

        if any(not check.ok for check in findings.checks if check.name == "ray"):
            return
        found = on_a_node(_ask_all, cfg.model_dump(mode="json"), uses, patient)
    else:
        found = _ask_all(cfg, uses, patient, tell)
    for name, answer in found.items():
        findings.look(name, _as_found, answer, name, begun)


def _as_found(
    answer: tuple[dict[str, Info], str] | Exception, name: str, begun: Iterable[StageFolder]
) -> tuple[None, str]:
    if isinstance(answer, Exception):
        raise answer
    infos, said = answer
    for info in infos.values():
        for folder in begun:
            is_known(folder, name, info)
    return None, said


def _ask_all(
    cfg: SynthConfig | dict[str, Any],
    uses: frozenset[str],
    patient: bool,
    tell: Tell = lambda line: None,
) -> dict[str, tuple[dict[str, Info], str] | Exception]:
    """What each service says, or why it cannot be used."""
    told = cfg if isinstance(cfg, SynthConfig) else SynthConfig.model_validate(cfg)

    async def ask() -> list[Any]:
        with watching(tell) as absences:
            asked = (_ASKED[name](told, patient, absences) for name in names)
            return await asyncio.gather(*asked, return_exceptions=True)

    names = [name for name in _ASKED if name in uses]
    return dict(zip(names, asyncio.run(ask()), strict=True))


async def _teacher(
    cfg: SynthConfig, patient: bool, absences: Absences
) -> tuple[dict[str, Info], str]:
    """Raises UserError where it is away, refuses the key, has not the model, has no chat template
    or no chats at all, or reads too little; LLMError for what else fails."""
    from scorekit.llm import Sampling

    of, generation = cfg.teacher, cfg.teacher.generation
    async with open_teacher(cfg, patient=patient) as teacher:
        absences.mind("the teacher", teacher, of.wait_for_server_s if patient else 0.0)
        room = await teacher.check()
        blobs = cfg.final_generation.blob.enabled
        key = "max_tokens_blob" if blobs else "max_tokens"
        most = getattr(generation, key)
        if room is not None and most >= room:
            raise UserError(
                f"teacher.generation.{key}: is {most}, and {teacher.base_url} reads and writes "
                f"{room} tokens of a chat: lower it, or start the server with a larger "
                "--max-model-len"
            )
        sampling = Sampling(max_tokens=1, temperature=0.0, top_p=generation.top_p)
        await teacher.chat(asking(cfg)(EASY), sampling, request_id=f"preflight-{uuid4().hex}")
        return {}, f"{teacher.base_url} serves {of.model}, and answers a chat"


async def _metricx(
    cfg: SynthConfig, patient: bool, absences: Absences
) -> tuple[dict[str, Info], str]:
    """Raises UserError where one is away, is not what the config expects, or differs from the
    others."""
    infos: dict[str, Info] = {}
    for url in _urls(cfg.metricx.url):
        async with ScoringClient(url) as client:
            absences.mind(f"MetricX at {url}", client, READY_S)
            infos[url] = await service_info(client, METRICX_URL, patient=patient)
        check_metricx(cfg, infos[url])
    check_agreement(METRICX_URL, infos)
    return infos, "; ".join(f"{url} has {info.model}" for url, info in infos.items())


async def _judge(
    cfg: SynthConfig, patient: bool, absences: Absences
) -> tuple[dict[str, Info], str]:
    """Raises UserError where one is away, is not what the config expects, or gives no verdict: its
    LLM may be away, or refuse its key."""
    infos: dict[str, Info] = {}
    seconds = cfg.teacher.request_timeout_s
    for url in _urls(cfg.filters.llm_judge.url):
        async with ScoringClient(url, timeout_s=seconds, deadline_s=seconds) as client:
            absences.mind(f"the judge at {url}", client, READY_S)
            infos[url] = await service_info(client, JUDGE_URL, patient=patient)
            check_service(JUDGE_URL, url, infos[url], "judge")
            check_judge(cfg, infos[url])
            await _need_verdict(cfg, client, url, patient)
    check_agreement(JUDGE_URL, infos)
    return infos, "; ".join(f"{url} judges by {info.model}" for url, info in infos.items())


async def _need_verdict(cfg: SynthConfig, client: ScoringClient, url: str, patient: bool) -> None:
    # A text that no cache knows.
    sample, options = judge_request(cfg, languages(cfg), EASY, f"{EASY} {uuid4().hex}")
    for pause in (0.0, *(cfg.teacher.retry.backoff_s if patient else ())):
        await asyncio.sleep(pause)
        (result,) = await client.score([sample], options)
        if not isinstance(result, Failed) or not result.error.retryable:
            break
    # One answer that does not fit the rubric is no fault of the service.
    if isinstance(result, Failed) and result.error.type != "model_failure":
        raise UserError(
            f"{JUDGE_URL}: {url} gives no verdict ({result.error.type}: {result.error.message}): "
            "see to its LLM, its key and filters.llm_judge.model"
        )


def _urls(urls: str | list[str]) -> list[str]:
    return [urls] if isinstance(urls, str) else urls


_Asking = Callable[[SynthConfig, bool, Absences], Coroutine[Any, Any, tuple[dict[str, Info], str]]]
#: Name of a service -> how it is asked.
_ASKED: dict[str, _Asking] = {"teacher": _teacher, "metricx": _metricx, "judge": _judge}
