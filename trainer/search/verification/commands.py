"""The command `scorekit search verify`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainer.search.curation.command_line import CurationOptions, curation_command

if TYPE_CHECKING:
    from scorekit.retrieval.client import Retriever
    from trainer.search.answer.config import AnsweringConfig
    from trainer.search.curation.config import CurationConfig
    from trainer.search.records import Question
    from trainer.search.verification.compare import Verified
    from trainer.search.verification.human_labels import HumanLabel

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
        from trainer.search.config import SearchConfig
        from trainer.search.curation.reanswer import servers
        from trainer.search.services import check_retriever, open_retriever
        from trainer.search.verification.compare import estimate_lines, skip_reason
        from trainer.search.verification.human_labels import read_people
        from trainer.search.verification.verified import make_verified, verified_page
        from trainer.search.verification.verifier import check_independent
        from trainer.search.verification.worksheet import worksheets

        answering, retriever = servers(options.runs, cfg)
        decided = options.prior_decisions(prompts)
        max_images = answering.generator.max_images
        by_id = {prompt.question.id: prompt for prompt in prompts}
        skipped = {
            row_id: reason
            for row_id, prompt in by_id.items()
            if (reason := skip_reason(prompt, cfg, max_images, decided.record)) is not None
        }
        chosen = [prompt.question for row_id, prompt in by_id.items() if row_id not in skipped]
        if options.estimate:
            typer.echo("\n".join(estimate_lines(chosen, cfg.verify, answering)))
            return
        check_independent(cfg.verify.verifier, answering.generator)
        if cfg.verify.verifier.model == answering.generator.model:
            log.warning("verifier and generator have the same name: is the verifier independent?")
        people: dict[str, HumanLabel] = {}
        inputs = dict(decided.inputs)
        if decisions is not None:
            people, inputs["decisions"] = read_people(decisions, by_id)
        search = SearchConfig(retriever=retriever)
        check_retriever(search)
        with open_retriever(search) as pages:
            results = skipped | _ask(options.out, chosen, cfg, answering, pages)
            curated = make_verified(prompts, read, cfg.verify, results, people, decided)
            curated.inputs = inputs
            curated.manifest_extra = {**curated.manifest_extra, "index": pages.info().revision}
            more = worksheets(curated, by_id, pages.image)
            options.write(curated, verified_page, prompts, more=more)
        typer.echo(f"worksheet: {options.out / 'worksheet.html'}, worksheet.csv")
        if agreement := curated.manifest_extra["people"]:
            typer.echo("\n".join(agreement["lines"]))


def _ask(
    out: Path,
    questions: Sequence[Question],
    cfg: CurationConfig,
    answering: AnsweringConfig,
    pages: Retriever,
) -> dict[str, Verified]:
    """Return the result of each question by its id."""
    from trainer.search.curation.reanswer import ask_all, kept_answers
    from trainer.search.verification.compare import verify_row
    from trainer.search.verification.verifier import VERIFIER

    def text(page_id: str) -> str:
        return "\n".join(box.text for box in pages.page(page_id).boxes)

    verify_in_index = partial(verify_row, pages=pages.image, texts=text, cfg=cfg.verify)
    results = ask_all(
        answering,
        kept_answers(cfg, out),
        f"verify {out.absolute()}",
        [partial(verify_in_index, question=question) for question in questions],
        {VERIFIER: (cfg.verify.verifier, cfg.verify.price)},
    )
    return dict(zip((question.id for question in questions), results, strict=True))
