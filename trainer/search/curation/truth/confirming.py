"""What `alternatives` and `hallucinations` ask, with the pages and pictures that it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scorekit.client.embeddings import Embeddings
from scorekit.errors import SampleError
from scorekit.retrieval.client import Retriever
from trainer.search.answer.config import AnsweringConfig
from trainer.search.config import RetrieverConfig
from trainer.search.curation.asking import Asking, ask_all, kept_answers
from trainer.search.curation.config import CurationConfig
from trainer.search.curation.truth.alternatives import Confirmed, confirm
from trainer.search.curation.truth.config import AlternativesConfig, Kind
from trainer.search.curation.truth.hallucinations import Suspect, kind_of
from trainer.search.curation.truth.proposals import Embed, Proposal, propose
from trainer.search.records import Question
from trainer.search.trajectories.store import FOLDER, TrajectoryStore


@dataclass(frozen=True, slots=True)
class AllConfirmed:
    """Of all questions, by their ids. told: by which index, generator and embedder."""

    proposals: Mapping[str, Sequence[Proposal]]
    results: Mapping[str, Confirmed]
    told: Mapping[str, Any]


def confirm_all(
    questions: Sequence[Question],
    answering: AnsweringConfig,
    pages: RetrieverConfig,
    cfg: CurationConfig,
    out: Path,
) -> AllConfirmed:
    """Propose pages for every question, and ask about them. Raises UserError,
    ServiceUnreachable."""
    of = cfg.alternatives
    retriever = Retriever(pages.url, timeout_s=pages.timeout_s, deadline_s=pages.deadline_s)
    with retriever, _embedder(of) as (embed, model):
        index = retriever.info()
        proposals = propose(questions, retriever, of, embed)

        async def picture(page_id: str) -> bytes:
            return await asyncio.to_thread(retriever.image, page_id)

        def job(one: Question) -> Callable[[Asking], Awaitable[Confirmed]]:
            return lambda asking: confirm(asking, one, proposals.get(one.id, ()), picture, of)

        jobs = [job(one) for one in questions]
        results = ask_all(answering, kept_answers(cfg, out), f"alternatives {out.name}", jobs)
    told = {"index": index.revision, "generator": answering.generator.model, "embedder": model}
    by_id = {one.id: result for one, result in zip(questions, results, strict=True)}
    return AllConfirmed(proposals, by_id, told)


@contextmanager
def _embedder(cfg: AlternativesConfig) -> Iterator[tuple[Embed | None, str | None]]:
    """Vectors by the server that is named, and its model; none without one."""
    if cfg.embeddings_url is None:
        yield None, None
        return
    with Embeddings(cfg.embeddings_url, model=cfg.embeddings_model) as embeddings:

        def embed(texts: Sequence[str]) -> list[Sequence[float] | None]:
            found = embeddings.embed(texts)
            return [None if isinstance(one, SampleError) else one for one in found]

        yield embed, embeddings.info().model


def kinds_of(
    questions: Mapping[str, Question],
    suspects: Mapping[str, Sequence[Suspect]],
    runs: Sequence[Path],
    answering: AnsweringConfig,
    cfg: CurationConfig,
    out: Path,
) -> dict[str, Kind]:
    """The kind of every suspect, by its `Sample.ref`; the pictures are those of its run. Raises
    UserError, also where a picture is not there."""
    stores = [TrajectoryStore(run / FOLDER) for run in runs]

    async def picture(order: int, sha256: str) -> bytes:
        return await asyncio.to_thread(stores[order].picture, sha256)

    def job(name: str, one: Suspect) -> Callable[[Asking], Awaitable[Kind]]:
        return lambda asking: kind_of(asking, questions[name], one, picture, cfg.hallucinations)

    wanted = [(name, one) for name in questions for one in suspects.get(name, ())]
    jobs = [job(name, one) for name, one in wanted]
    kinds = ask_all(answering, kept_answers(cfg, out), f"hallucinations {out.name}", jobs)
    return {one.ref: kind for (_, one), kind in zip(wanted, kinds, strict=True)}
