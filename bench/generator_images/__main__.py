"""Measure what the generator answers right from originals and from images as shown, and the tokens.

It asks the 507 questions of the search demo, development and final test, of which 151 are about
small print (letters of 5.5 points on a slide of 960 x 540). The evidence of both sides is the same:
the gold pages, or what the demo's searcher without weights was shown in one episode a question and
seed, crops among them. Pages are rendered as the retriever does by default (144 dots an inch:
1,920 x 1,080). The generator is the demo's, which is no model: it reads a text if its letters are
at least 9 pixels high in an image. It is told where an image stands on its page. A judge by rules
compares. `read_text.py` reads the same images with an OCR model.

Tokens are counted by the patches of Qwen2.5-VL (28 x 28 pixels a token) and of Qwen3-VL (32 x 32),
over all images of a request. Bytes are those of PNG files in the store; each image is stored once.

    python -m bench.generator_images [--quick]
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any
from uuid import uuid4

from PIL import Image

from bench.common import WORK, Measurement, quiet_logs, run
from bench.generator_images.episodes import Images, PlacingReader, gold_episodes, searched_episodes
from bench.generator_images.small_print import write_small_print
from demo.search.answer_keys import FINAL_KEYS, KEYS
from demo.search.answering import Answerer
from demo.search.generator import NAME as GENERATOR
from demo.search.generator import create_app
from demo.search.make_corpus import FINAL_TEST, HELDOUT, TRAIN
from demo.search.policy import searcher
from demo.search.reading import CORPUS, FINAL_CORPUS
from demo.search.run import ingest
from scorekit.retrieval.client import Retriever
from testing.processes import running_services, serving
from trainer.search.answer.config import MAX_PIXELS, AnsweringConfig
from trainer.search.answer.pipeline import AnswerPipeline
from trainer.search.config import SearchData, SightConfig
from trainer.search.data import load_questions
from trainer.search.images.image_data import displayed_size
from trainer.search.images.views import page_view
from trainer.search.records import Question, Trajectory

SEEDS = (1, 2, 3)
#: Budgets of an original: half of the default, the default, the whole page.
BUDGETS = (MAX_PIXELS // 2, MAX_PIXELS, 16_000_000)
SMALL_PRINT = "small print"
#: Model -> its limits of an image (`factor` pixels a side make one token).
MODELS = {
    "Qwen2.5-VL": SightConfig(factor=28, min_pixels=3_136, max_pixels=12_845_056),
    "Qwen3-VL": SightConfig(factor=32, min_pixels=65_536, max_pixels=16_777_216),
}


@dataclass(frozen=True, slots=True)
class Services:
    """Holds the addresses of the demo's services and a client of the retriever."""

    pages: Retriever
    policy: str
    reader: PlacingReader
    answering: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Holds the result of an episode.

    right: None without a verdict.
    images: of the request.
    """

    question: Question
    right: bool | None
    images: tuple[str, ...]


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield all measurements."""
    folder = WORK / "generator_images"
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("answers*"):  # paid answers of an earlier run
        path.unlink()
    all_questions = [
        question
        for path in (TRAIN, HELDOUT, FINAL_TEST)
        for question in load_questions(str(path), SearchData())
    ]
    all_questions = all_questions[::20] if quick else all_questions
    budgets = BUDGETS[1:2] if quick else BUDGETS
    quiet_logs()
    with _services(folder) as services:
        for mode, budget in (("shown", MAX_PIXELS), *(("original", size) for size in budgets)):
            images: Images = {}
            episodes = gold_episodes(all_questions, services.pages, budget, images)
            yield from _compare("gold pages", mode, episodes, budget, images, services, folder)
        yield from _search(all_questions, services, folder, SEEDS[:1] if quick else SEEDS)
        yield from _cost(all_questions, services.pages)
        small = [question for question in all_questions if question.question_type == SMALL_PRINT]
        sizes = {f"original, {budget:,}": budget for budget in budgets}
        write_small_print(folder / "small_print", small, services.pages, sizes)


def _search(
    all_questions: Sequence[Question], services: Services, folder: Path, seeds: Sequence[int]
) -> Iterator[Measurement]:
    """Yield the measurements on episodes of the searcher, which both sides share."""
    images: Images = {}
    episodes = [
        episode
        for seed in seeds
        for episode in searched_episodes(
            all_questions, services.pages, services.policy, MAX_PIXELS, images, seed
        )
    ]
    for mode in ("shown", "original"):
        yield from _compare("searched", mode, episodes, MAX_PIXELS, images, services, folder)


@contextmanager
def _services(folder: Path) -> Iterator[Services]:
    """Start retriever, judge, generator and searcher over the corpora of both sets."""
    if not (folder / "index").exists():
        ingest(folder / "index", CORPUS, FINAL_CORPUS)
    answerer = Answerer((CORPUS, FINAL_CORPUS), (KEYS, FINAL_KEYS))
    reader = answerer.reader = PlacingReader(CORPUS, FINAL_CORPUS)
    index = str(folder / "index")
    with (
        running_services(folder, {"retriever": ("--index", index), "judge": ()}) as urls,
        serving(create_app(answerer=answerer)) as generator,
        serving(searcher(reader).app) as policy,
        Retriever(urls["retriever"]) as pages,
    ):
        chat = {"base_url": f"{generator}/v1", "model": GENERATOR, "deadline_s": 3600.0}
        yield Services(pages, policy, reader, {"generator": chat, "judge": {"url": urls["judge"]}})


def _compare(
    evidence: str,
    mode: str,
    episodes: Sequence[Trajectory],
    max_pixels: int,
    images: Images,
    services: Services,
    folder: Path,
) -> Iterator[Measurement]:
    """Yield the share of right answers of one side, and its tokens."""
    side = "shown" if mode == "shown" else f"original, at most {max_pixels:,} pixels"
    generator = {**services.answering["generator"], "images": mode, "max_pixels": max_pixels}
    cfg = AnsweringConfig.model_validate({**services.answering, "generator": generator})
    services.reader.note_places(episodes, images)
    outcomes = asyncio.run(_outcomes(cfg, episodes, images, folder))
    for title, part in (
        ("all questions", outcomes),
        (SMALL_PRINT, [o for o in outcomes if o.question.question_type == SMALL_PRINT]),
    ):
        verdicts = [outcome.right for outcome in part if outcome.right is not None]
        yield Measurement(
            f"{evidence}, {side}: answered right, {title}",
            statistics.mean(verdicts),
            "",
            details={"episodes": len(part), "with_a_verdict": len(verdicts)},
        )
    sent = [image for outcome in outcomes for image in outcome.images]
    yield Measurement(
        f"{evidence}, {side}: images of a request", len(sent) / len(outcomes), "images"
    )
    for model, sight in MODELS.items():
        tokens = {image: _tokens(images[image], sight) for image in set(sent)}
        per_request = [sum(tokens[image] for image in outcome.images) for outcome in outcomes]
        yield Measurement(
            f"{evidence}, {side}: tokens of its images, {model}",
            statistics.mean(per_request),
            "tokens",
            details={"largest_image": max(tokens.values()), "largest_request": max(per_request)},
        )


async def _outcomes(
    cfg: AnsweringConfig, episodes: Sequence[Trajectory], images: Images, folder: Path
) -> list[Outcome]:
    pipeline = AnswerPipeline(cfg, run=uuid4().hex, folder=folder)
    try:
        await pipeline.check()
        finished = await asyncio.gather(
            *(pipeline.finish(episode, images.__getitem__) for episode in episodes)
        )
    finally:
        await pipeline.close()
    return [
        Outcome(
            episode.question,
            episode.success,
            tuple(episode.answer.evidence) if episode.answer else (),
        )
        for episode in finished
    ]


def _tokens(png: bytes, sight: SightConfig) -> int:
    """Return the tokens that a model makes of an image."""
    with Image.open(BytesIO(png)) as image:
        width, height = displayed_size(*image.size, sight)
    return width * height // sight.factor**2


def _cost(all_questions: Sequence[Question], pages: Retriever) -> Iterator[Measurement]:
    """Yield the bytes that a page takes in the store, and the time of its images."""
    page_ids = list(dict.fromkeys(page for question in all_questions for page in question.gold))
    sight, pngs = SightConfig(), [pages.image(page) for page in page_ids]
    views = [page_view("p", png, sight, MAX_PIXELS) for png in pngs]
    sizes = {
        "as shown": [len(view.png) for view in views],
        "original": [len(view.original or b"") for view in views],
        "the retriever's file": [len(png) for png in pngs],
    }
    for name, of_page in sizes.items():
        mean_kb, largest = statistics.mean(of_page) / 1000, max(of_page)
        details = {"pages": len(page_ids), "largest": largest}
        yield Measurement(f"bytes of a page, {name}", mean_kb, "kB", details=details)
    for name, max_pixels in (("as shown", None), ("as shown, and its original", MAX_PIXELS)):
        render = partial(page_view, "p", sight=sight, original_pixels=max_pixels)
        seconds = [_cpu_s(partial(render, png)) for png in pngs]
        yield Measurement(
            f"processor time of a page {name}", 1000 * statistics.median(seconds), "ms"
        )


def _cpu_s(work: Callable[[], Any]) -> float:
    started = time.thread_time()
    work()
    return time.thread_time() - started


if __name__ == "__main__":
    run("generator_images", __doc__, questions)
