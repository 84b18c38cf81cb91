"""python -m trainer search verify."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainer.search.curation.command_line import (
    ConfigFile,
    EstimateOnly,
    Out,
    Overrides,
    Overwrite,
    Record,
    SomeRuns,
    curating,
)

if TYPE_CHECKING:
    from scorekit.retrieval.client import Retriever
    from trainer.search.answer.config import AnsweringConfig
    from trainer.search.config import RetrieverConfig
    from trainer.search.curation.config import CurationConfig
    from trainer.search.curation.known import Known
    from trainer.search.curation.samples import CuratedPrompt, CuratedRun
    from trainer.search.curation.verification.compare import Verified
    from trainer.search.curation.verification.people import Judgement
    from trainer.sft.curation_record import CurationRecord

log = logging.getLogger(__name__)

Decisions = Annotated[
    Path | None,
    typer.Option("--decisions", help="worksheet.csv with people's classes, which overrule."),
]


def verify(
    out: Out,
    run: SomeRuns = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    overwrite: Overwrite = False,
    estimate: EstimateOnly = False,
    decisions: Decisions = None,
    record: Record = None,
) -> None:
    """Whether the references are right, by a verifier, the generator and the judge."""
    runs, beside = list(run or []), list(record or [])
    with curating(runs, out, config, set_, overwrite, estimate=estimate, read_paths=beside) as (
        cfg,
        prompts,
        read,
    ):
        from trainer.search.curation.asking import servers
        from trainer.search.curation.known import read_known

        answering, retriever = servers(runs, cfg)
        known = read_known(prompts, records=beside)
        if estimate:
            _estimate(prompts, cfg, answering, known.record)
        else:
            _verify(out, prompts, read, cfg, answering, retriever, decisions, known)


def _estimate(
    prompts: Sequence[CuratedPrompt],
    cfg: CurationConfig,
    answering: AnsweringConfig,
    record: CurationRecord,
) -> None:
    from trainer.search.curation.verification.compare import reckoned, why_not

    most = answering.generator.max_images
    chosen = [one.question for one in prompts if why_not(one, cfg, most, record) is None]
    for line in reckoned(chosen, cfg.verify, answering):
        typer.echo(line)


def _ask(
    out: Path,
    prompts: Sequence[CuratedPrompt],
    cfg: CurationConfig,
    answering: AnsweringConfig,
    pages: Retriever,
    record: CurationRecord,
) -> dict[str, Verified | str]:
    """Row id -> what became of it, or why it was not asked about."""
    from trainer.search.curation.asking import ask_all, kept_answers
    from trainer.search.curation.verification.compare import job, why_not
    from trainer.search.curation.verification.verifier import VERIFIER

    most = answering.generator.max_images
    why = {prompt.question.id: why_not(prompt, cfg, most, record) for prompt in prompts}

    def text(page_id: str) -> str:
        return "\n".join(box.text for box in pages.page(page_id).boxes)

    chosen = [one.question for one in prompts if why[one.question.id] is None]
    done = ask_all(
        answering,
        kept_answers(cfg, out),
        f"verify {out.absolute()}",
        [job(question, pages.image, text, cfg.verify) for question in chosen],
        {VERIFIER: (cfg.verify.verifier, cfg.verify.price)},
    )
    found = dict(zip((question.id for question in chosen), done, strict=True))
    return {row_id: found.get(row_id) or str(reason) for row_id, reason in why.items()}


def _verify(
    out: Path,
    prompts: Sequence[CuratedPrompt],
    read: Sequence[CuratedRun],
    cfg: CurationConfig,
    answering: AnsweringConfig,
    retriever: RetrieverConfig,
    decisions: Path | None,
    known: Known,
) -> None:
    from trainer.search.config import SearchConfig
    from trainer.search.curation.command_line import write
    from trainer.search.curation.verification.people import read_people
    from trainer.search.curation.verification.verified import make_verified, verified_page
    from trainer.search.curation.verification.verifier import check_independent
    from trainer.search.curation.verification.worksheet import worksheets
    from trainer.search.neighbours import meet_retriever, open_retriever

    check_independent(cfg.verify.verifier, answering.generator)
    if cfg.verify.verifier.model == answering.generator.model:
        log.warning("verifier and generator have the same name: is the verifier independent?")
    people: dict[str, Judgement] = {}
    inputs = dict(known.inputs)
    if decisions is not None:
        people, digest = read_people(decisions, {one.question.id for one in prompts})
        inputs["decisions"] = digest
    by_id = {one.question.id: one for one in prompts}
    search = SearchConfig(retriever=retriever)
    meet_retriever(search)
    with open_retriever(search) as pages:
        asked = _ask(out, prompts, cfg, answering, pages, known.record)
        made = make_verified(prompts, read, cfg.verify, asked, people, known.record)
        made.inputs = inputs
        made.told = {**made.told, "index": pages.info().revision}
        write(out, made, verified_page, prompts, more=worksheets(made, by_id, pages.image))
    typer.echo(f"worksheet: {out / 'worksheet.html'}, worksheet.csv")
    if found := made.told["people"]:
        for line in found["lines"]:
            typer.echo(line)
