"""The commands `python -m trainer search diagnose|alternatives|hallucinations`."""

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
    from trainer.search.curation.diagnosis.hallucinations import Suspect
    from trainer.search.curation.samples import EpisodeSummary
    from trainer.search.records import Trajectory


def register(app: typer.Typer) -> None:
    """Register the commands."""
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
    """Find out why prompts score low: a wrong search, answer or judgement, or an early end."""
    from trainer.search.curation.diagnosis.causes import EpisodeEvidence, episode_evidence
    from trainer.search.curation.disk_spool import DiskSpool

    clues, read_paths = DiskSpool(EpisodeEvidence), list(record or [])

    def visit(trajectory: Trajectory, sample: EpisodeSummary) -> None:
        clues.append(episode_evidence(trajectory), sample.ref)

    with curating(run, out, config, set_, overwrite, visit=visit, read_paths=read_paths) as (
        cfg,
        prompts,
        read,
    ):
        from trainer.search.curation.diagnosis.diagnose import diagnosis_page, make_diagnosis
        from trainer.search.curation.prior_decisions import read_known

        decided = read_known(prompts, records=read_paths)
        result = make_diagnosis(prompts, read, cfg, clues, decided.record)
        result.inputs = decided.inputs
        write(
            out,
            result,
            lambda result, prompts_by_id: diagnosis_page(result, prompts_by_id, clues),
            prompts,
        )


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
        from trainer.search.curation.diagnosis.alternatives import (
            alternatives_page,
            make_alternatives,
            max_requests,
        )
        from trainer.search.curation.diagnosis.confirming import confirm_all
        from trainer.search.curation.reanswer import estimated_usage, servers

        answering, retriever = servers(runs, cfg)
        questions = [prompt.question for prompt in prompts]
        if estimate:
            planned = max_requests(questions, cfg.alternatives)
            typer.echo("\n".join(estimated_usage(planned, answering)))
            return
        confirmed = confirm_all(questions, answering, retriever, cfg, out)
        result = make_alternatives(
            prompts, read, cfg, confirmed.proposals, confirmed.results, confirmed.manifest_extra
        )
        write(
            out,
            result,
            lambda result, prompts_by_id: alternatives_page(
                result, prompts_by_id, confirmed.proposals, confirmed.results
            ),
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
    """Find the sources of right answers without gold evidence, with new calls."""
    suspects: dict[str, list[Suspect]] = {}
    read_paths = list(record or [])

    with configured(out, config, set_, overwrite, estimate=estimate, read_paths=read_paths) as cfg:
        from trainer.search.curation.diagnosis.confirming import kinds_of
        from trainer.search.curation.diagnosis.hallucinations import (
            hallucinations_page,
            make_hallucinations,
            max_requests,
            suspect_of,
        )
        from trainer.search.curation.prior_decisions import read_known
        from trainer.search.curation.reanswer import estimated_usage, servers
        from trainer.search.curation.samples import read_prompts

        def visit(trajectory: Trajectory, sample: EpisodeSummary) -> None:
            suspect = suspect_of(trajectory, sample, cfg.hallucinations)
            if suspect is not None:
                suspects.setdefault(trajectory.question.id, []).append(suspect)

        prompts, read = read_prompts(run, cfg, visit)

        answering, _ = servers(run, cfg)
        decided = read_known(prompts, records=read_paths)
        questions = {prompt.question.id: prompt.question for prompt in prompts}
        if estimate:
            planned = max_requests(suspects, questions, cfg.hallucinations)
            typer.echo("\n".join(estimated_usage(planned, answering)))
            return
        kinds = kinds_of(questions, suspects, run, answering, cfg, out)
        result = make_hallucinations(prompts, read, cfg, suspects, kinds, decided.record)
        result.inputs = decided.inputs
        write(
            out,
            result,
            lambda result, prompts_by_id: hallucinations_page(
                result, prompts_by_id, suspects, kinds
            ),
            prompts,
        )
