"""The commands `scorekit search diagnose|alternatives|hallucinations`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import typer

from trainer.search.curation.command_line import CurationOptions, curation_command

if TYPE_CHECKING:
    from trainer.search.curation.samples import EpisodeSummary
    from trainer.search.diagnosis.hallucinations import Suspect
    from trainer.search.records import Trajectory


@curation_command("run", "out", "record", "config", "set_", "overwrite")
def diagnose(options: CurationOptions) -> None:
    """Find out why prompts score low: a wrong search, answer or judgement, or an early end."""
    from trainer.search.curation.disk_spool import DiskSpool
    from trainer.search.diagnosis.causes import EpisodeEvidence, episode_evidence

    clues = DiskSpool(EpisodeEvidence)

    def visit(trajectory: Trajectory, sample: EpisodeSummary) -> None:
        clues.append(episode_evidence(trajectory), sample.ref)

    with options.curating(visit=visit) as (cfg, prompts, read):
        from trainer.search.diagnosis.diagnose import diagnosis_page, make_diagnosis

        decided = options.prior_decisions(prompts)
        result = make_diagnosis(prompts, read, cfg, clues, decided)
        options.write(result, partial(diagnosis_page, clues=clues), prompts)


@curation_command("out", "some_runs", "config", "set_", "estimate", "overwrite")
def alternatives(options: CurationOptions) -> None:
    """Find pages that carry the same fact as a gold page, and add them to the rows.

    Proposed by text overlap and embeddings; confirmed by the generator's answer from such a page.
    """
    with options.curating() as (cfg, prompts, read):
        from trainer.search.curation.reanswer import estimated_usage, servers
        from trainer.search.diagnosis.alternatives import (
            alternatives_page,
            make_alternatives,
            max_requests,
        )
        from trainer.search.diagnosis.confirming import confirm_all

        answering, retriever = servers(options.runs, cfg)
        questions = [prompt.question for prompt in prompts]
        if options.estimate:
            planned = max_requests(questions, cfg.alternatives)
            typer.echo("\n".join(estimated_usage(planned, answering)))
            return
        proposals, results, extra = confirm_all(questions, answering, retriever, cfg, options.out)
        result = make_alternatives(prompts, read, cfg, proposals, results, extra)
        page = partial(alternatives_page, proposals=proposals, results=results)
        options.write(result, page, prompts)


@curation_command("run", "out", "record", "config", "set_", "estimate", "overwrite")
def hallucinations(options: CurationOptions) -> None:
    """Find the sources of right answers without gold evidence, with new calls."""
    suspects: dict[str, list[Suspect]] = {}

    with options.configured() as cfg:
        from trainer.search.curation.reanswer import estimated_usage, servers
        from trainer.search.curation.samples import read_prompts
        from trainer.search.diagnosis.confirming import kinds_of
        from trainer.search.diagnosis.hallucinations import (
            hallucinations_page,
            make_hallucinations,
            max_requests,
            suspect_of,
        )

        def visit(trajectory: Trajectory, sample: EpisodeSummary) -> None:
            suspect = suspect_of(trajectory, sample, cfg.hallucinations)
            if suspect is not None:
                suspects.setdefault(trajectory.question.id, []).append(suspect)

        prompts, read = read_prompts(options.runs, cfg, visit)

        answering, _ = servers(options.runs, cfg)
        decided = options.prior_decisions(prompts)
        questions = {prompt.question.id: prompt.question for prompt in prompts}
        if options.estimate:
            planned = max_requests(suspects, questions, cfg.hallucinations)
            typer.echo("\n".join(estimated_usage(planned, answering)))
            return
        kinds = kinds_of(questions, suspects, options.runs, answering, cfg, options.out)
        result = make_hallucinations(prompts, read, cfg, suspects, kinds, decided)
        page = partial(hallucinations_page, suspects=suspects, kinds=kinds)
        options.write(result, page, prompts)
