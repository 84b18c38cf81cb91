"""python -m trainer search diagnose|...: what is wrong with policy, neighbours and data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from trainer.search.curation.command_line import (
    ConfigFile,
    EstimateOnly,
    Out,
    Overrides,
    Overwrite,
    Record,
    Runs,
    SomeRuns,
    configured,
    curating,
    write,
)

if TYPE_CHECKING:
    from trainer.search.curation.samples import Sample
    from trainer.search.curation.truth.hallucinations import Suspect
    from trainer.search.records import Trajectory


def register(app: typer.Typer) -> None:
    """Put the commands beside the others of `search`."""
    app.command()(diagnose)
    app.command()(alternatives)
    app.command()(hallucinations)


def diagnose(
    run: Runs,
    out: Out,
    record: Record = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    overwrite: Overwrite = False,
) -> None:
    """Why prompts score low: searched wrong, answered wrong, judged wrong, ended too early."""
    from trainer.search.curation.spool import Spool
    from trainer.search.curation.truth.causes import Clue, clue_of

    clues, beside = Spool(Clue), list(record or [])

    def visit(trajectory: Trajectory, sample: Sample) -> None:
        clues.append(clue_of(trajectory), sample.ref)

    with curating(run, out, config, set_, overwrite, visit=visit, read_paths=beside) as (
        cfg,
        prompts,
        read,
    ):
        from trainer.search.curation.known import read_known
        from trainer.search.curation.truth.diagnose import diagnosis_page, make_diagnosis

        known = read_known(prompts, records=beside)
        made = make_diagnosis(prompts, read, cfg, clues, known.record)
        made.inputs = known.inputs
        write(out, made, lambda made, of: diagnosis_page(made, of, clues), prompts)


def alternatives(
    out: Out,
    run: SomeRuns = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    estimate: EstimateOnly = False,
    overwrite: Overwrite = False,
) -> None:
    """Find pages that carry the same fact as a gold page, and add them to the rows.

    Proposed by text overlap and embeddings; confirmed by the generator's answer from such a page.
    """
    runs = list(run or [])
    with curating(runs, out, config, set_, overwrite, estimate=estimate) as (cfg, prompts, read):
        from trainer.search.curation.asking import reckoned, servers
        from trainer.search.curation.truth.alternatives import (
            alternatives_page,
            asked_at_most,
            make_alternatives,
        )
        from trainer.search.curation.truth.confirming import confirm_all

        answering, retriever = servers(runs, cfg)
        questions = [one.question for one in prompts]
        if estimate:
            asked = asked_at_most(questions, cfg.alternatives)
            typer.echo("\n".join(reckoned(asked, answering)))
            return
        done = confirm_all(questions, answering, retriever, cfg, out)
        made = make_alternatives(prompts, read, cfg, done.proposals, done.results, done.told)
        write(
            out,
            made,
            lambda made, of: alternatives_page(made, of, done.proposals, done.results),
            prompts,
        )


def hallucinations(
    run: Runs,
    out: Out,
    record: Record = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    estimate: EstimateOnly = False,
    overwrite: Overwrite = False,
) -> None:
    """Right answers without gold evidence: where they come from, found by asking again."""
    suspects: dict[str, list[Suspect]] = {}
    beside = list(record or [])

    with configured(out, config, set_, overwrite, estimate=estimate, read_paths=beside) as cfg:
        from trainer.search.curation.asking import reckoned, servers
        from trainer.search.curation.known import read_known
        from trainer.search.curation.samples import read_prompts
        from trainer.search.curation.truth.confirming import kinds_of
        from trainer.search.curation.truth.hallucinations import (
            asked_at_most,
            hallucinations_page,
            make_hallucinations,
            suspect_of,
        )

        def visit(trajectory: Trajectory, sample: Sample) -> None:
            suspect = suspect_of(trajectory, sample, cfg.hallucinations)
            if suspect is not None:
                suspects.setdefault(trajectory.question.id, []).append(suspect)

        prompts, read = read_prompts(run, cfg, visit)

        answering, _ = servers(run, cfg)
        known = read_known(prompts, records=beside)
        questions = {one.question.id: one.question for one in prompts}
        if estimate:
            asked = asked_at_most(suspects, questions, cfg.hallucinations)
            typer.echo("\n".join(reckoned(asked, answering)))
            return
        kinds = kinds_of(questions, suspects, run, answering, cfg, out)
        made = make_hallucinations(prompts, read, cfg, suspects, kinds, known.record)
        made.inputs = known.inputs
        write(out, made, lambda made, of: hallucinations_page(made, of, suspects, kinds), prompts)
