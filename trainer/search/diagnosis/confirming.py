"""Run the paid calls of `alternatives` and `hallucinations` with their pages and images."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from scorekit.client.embeddings import Embeddings
from scorekit.errors import SampleError
from scorekit.retrieval.client import Retriever
from trainer.search.answer.config import AnsweringConfig
from trainer.search.config import RetrieverConfig
from trainer.search.curation.config import CurationConfig
from trainer.search.curation.config_sections import AlternativesConfig, Kind
from trainer.search.curation.reanswer import ask_all, kept_answers
from trainer.search.diagnosis.alternatives import Confirmed, confirm
from trainer.search.diagnosis.hallucinations import Suspect, kind_of
from trainer.search.diagnosis.proposals import Embed, Proposal, propose
from trainer.search.images.views import page_within
from trainer.search.records import Question
from trainer.search.trajectories.store import FOLDER, TrajectoryStore


def confirm_all(
    questions: Sequence[Question],
    answering: AnsweringConfig,
    pages: RetrieverConfig,
    cfg: CurationConfig,
    out: Path,
) -> tuple[dict[str, list[Proposal]], dict[str, Confirmed], dict[str, Any]]:
    """Propose pages for each question and confirm them. Raises UserError, ServiceUnreachable.

    Returns the proposals and the results by question id, and for the manifest the index, generator
    and embedder.
    """
    alternatives_cfg, max_pixels = cfg.alternatives, answering.generator.max_pixels
    retriever = Retriever(pages.url, timeout_s=pages.timeout_s, deadline_s=pages.deadline_s)
    with retriever, _embedder(alternatives_cfg) as (embed, model):
        index = retriever.info()
        proposals = propose(questions, retriever, alternatives_cfg, embed)

        async def load_image(page_id: str) -> bytes:
            return await asyncio.to_thread(
                lambda: page_within(retriever.image(page_id), max_pixels)
            )

        jobs = [
            partial(
                confirm,
                question=question,
                proposals=proposals.get(question.id, ()),
                load_image=load_image,
                cfg=alternatives_cfg,
            )
            for question in questions
        ]
        results = ask_all(answering, kept_answers(cfg, out), f"alternatives {out.absolute()}", jobs)
    extra = {"index": index.revision, "generator": answering.generator.model, "embedder": model}
    by_id = {question.id: result for question, result in zip(questions, results, strict=True)}
    return proposals, by_id, extra


@contextmanager
def _embedder(cfg: AlternativesConfig) -> Iterator[tuple[Embed | None, str | None]]:
    """Open the embeddings server of the config; yield its function and model, or None."""
    if cfg.embeddings_url is None:
        yield None, None
        return
    with Embeddings(cfg.embeddings_url, model=cfg.embeddings_model) as embeddings:

        def embed(texts: Sequence[str]) -> list[Sequence[float] | None]:
            vectors = embeddings.embed(texts)
            return [None if isinstance(vector, SampleError) else vector for vector in vectors]

        yield embed, embeddings.info().model


def kinds_of(
    questions: Mapping[str, Question],
    suspects: Mapping[str, Sequence[Suspect]],
    runs: Sequence[Path],
    answering: AnsweringConfig,
    cfg: CurationConfig,
    out: Path,
) -> dict[str, Kind]:
    """Return the kind of each suspect by its `EpisodeSummary.ref`, with the images of its run.

    Raises UserError, also for a missing image.
    """
    stores = [TrajectoryStore(run / FOLDER) for run in runs]

    async def load_image(order: int, sha256: str) -> bytes:
        return await asyncio.to_thread(stores[order].read_image, sha256)

    named_suspects = [(name, suspect) for name in questions for suspect in suspects.get(name, ())]
    jobs = [
        partial(
            kind_of,
            question=questions[name],
            suspect=suspect,
            load_image=load_image,
            cfg=cfg.hallucinations,
        )
        for name, suspect in named_suspects
    ]
    kinds = ask_all(answering, kept_answers(cfg, out), f"hallucinations {out.absolute()}", jobs)
    return {suspect.ref: kind for (_, suspect), kind in zip(named_suspects, kinds, strict=True)}
