"""The command `python -m trainer search verify`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainer.search.curation.command_line import CurationOptions, curation_command

if TYPE_CHECKING:
    from scorekit.retrieval.client import Retriever
    from trainer.search.answer.config import AnsweringConfig
    from trainer.search.config import RetrieverConfig
    from trainer.search.curation.config import CurationConfig
    from trainer.search.curation.prior_decisions import PriorDecisions
    from trainer.search.curation.samples import CuratedPrompt, CuratedRun
    from trainer.search.verification.compare import Verified
    from trainer.search.verification.human_labels import HumanLabel
    from trainer.sft.curation_record import CurationRecord

log = logging.getLogger(__name__)


@curation_command(
    *("out", "some_runs", "config", "set_", "overwrite", "estimate", "decisions", "record")
)
def verify(
    options: CurationOptions,
    decisions: Annotated[
        Path | None,
        typer.Option("--decisions", help="worksheet.csv with people's classes, which overrule."),
    ] = None,
) -> None:
    """Check whether references are right, with a verifier, the generator and the judge."""
    with options.curating() as (cfg, prompts, read):
        from trainer.search.curation.reanswer import servers

        answering, retriever = servers(options.runs, cfg)
        decided = options.prior_decisions(prompts)
        if options.estimate:
            _estimate(prompts, cfg, answering, decided.record)
        else:
            _verify(options, prompts, read, cfg, answering, retriever, decisions, decided)


def _estimate(
    prompts: Sequence[CuratedPrompt],
    cfg: CurationConfig,
    answering: AnsweringConfig,
    record: CurationRecord,
) -> None:
    from trainer.search.verification.compare import estimate_lines, skip_reason

    max_images = answering.generator.max_images
    chosen = [
        prompt.question
        for prompt in prompts
        if skip_reason(prompt, cfg, max_images, record) is None
    ]
    for line in estimate_lines(chosen, cfg.verify, answering):
        typer.echo(line)


def _ask(
    out: Path,
    prompts: Sequence[CuratedPrompt],
    cfg: CurationConfig,
    answering: AnsweringConfig,
    pages: Retriever,
    record: CurationRecord,
) -> dict[str, Verified | str]:
    """Return the result of each row by id, or the reason why it was skipped."""
    from trainer.search.curation.reanswer import ask_all, kept_answers
    from trainer.search.verification.compare import job, skip_reason
    from trainer.search.verification.verifier import VERIFIER

    max_images = answering.generator.max_images
    skip_reasons = {
        prompt.question.id: skip_reason(prompt, cfg, max_images, record) for prompt in prompts
    }

    def text(page_id: str) -> str:
        return "\n".join(box.text for box in pages.page(page_id).boxes)

    chosen = [prompt.question for prompt in prompts if skip_reasons[prompt.question.id] is None]
    done = ask_all(
        answering,
        kept_answers(cfg, out),
        f"verify {out.absolute()}",
        [job(question, pages.image, text, cfg.verify) for question in chosen],
        {VERIFIER: (cfg.verify.verifier, cfg.verify.price)},
    )
    result_by_id = dict(zip((question.id for question in chosen), done, strict=True))
    return {
        row_id: result_by_id.get(row_id) or str(reason) for row_id, reason in skip_reasons.items()
    }


def _verify(
    options: CurationOptions,
    prompts: Sequence[CuratedPrompt],
    read: Sequence[CuratedRun],
    cfg: CurationConfig,
    answering: AnsweringConfig,
    retriever: RetrieverConfig,
    decisions: Path | None,
    decided: PriorDecisions,
) -> None:
    from trainer.search.config import SearchConfig
    from trainer.search.services import check_retriever, open_retriever
    from trainer.search.verification.human_labels import read_people
    from trainer.search.verification.verified import make_verified, verified_page
    from trainer.search.verification.verifier import check_independent
    from trainer.search.verification.worksheet import worksheets

    check_independent(cfg.verify.verifier, answering.generator)
    if cfg.verify.verifier.model == answering.generator.model:
        log.warning("verifier and generator have the same name: is the verifier independent?")
    people: dict[str, HumanLabel] = {}
    inputs = dict(decided.inputs)
    if decisions is not None:
        people, digest = read_people(decisions, {prompt.question.id for prompt in prompts})
        inputs["decisions"] = digest
    by_id = {prompt.question.id: prompt for prompt in prompts}
    search = SearchConfig(retriever=retriever)
    check_retriever(search)
    with open_retriever(search) as pages:
        results = _ask(options.out, prompts, cfg, answering, pages, decided.record)
        curated = make_verified(prompts, read, cfg.verify, results, people, decided.record)
        curated.inputs = inputs
        curated.manifest_extra = {**curated.manifest_extra, "index": pages.info().revision}
        more = worksheets(curated, by_id, pages.image)
        options.write(curated, verified_page, prompts, more=more)
    typer.echo(f"worksheet: {options.out / 'worksheet.html'}, worksheet.csv")
    if agreement := curated.manifest_extra["people"]:
        for line in agreement["lines"]:
            typer.echo(line)
