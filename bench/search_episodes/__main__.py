"""Measure the cost of 1,000 episodes of 7 turns when policy and retriever answer at once.

Policy and retriever are fakes in this process. The policy is a script, or a sampler that returns
the ids of a script (with the role-play demo's tokenizer and template). The answers of the retriever
are fixed. So the measured cost is that of the driver: parsing, records, conversations, ids. Images
are made of 20 pages of blocks and bars, 1280 x 720, each once. The cost of one image, and of one
crop, is a separate number.

    python -m bench.search_episodes [--quick]
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw
from transformers import AutoTokenizer

from bench.common import ROOT, Measurement, quiet_logs, run, timed
from scorekit.retrieval.wire import IndexInfo, Page, PageHit, TextBox
from trainer.chat.config import ChatConfig
from trainer.rl.config import SamplingConfig
from trainer.rl.sampler import SampledCompletion, SeededPrompt
from trainer.search.config import EpisodeConfig, SightConfig
from trainer.search.images.views import ShownImage, crop_view, page_view
from trainer.search.records import Question, Trajectory
from trainer.search.rollout.episode import Policy, TurnRequest, run_episodes
from trainer.search.rollout.episode_tokens import TurnTokenizer
from trainer.search.rollout.policies import ScriptPolicy
from trainer.search.rollout.sampled import SampledPolicy

TURNS, PAGES = 7, 20
WIDTH, HEIGHT = 1280, 720
COMPLETE = "<think>enough</think>\n<search_complete>true</search_complete>"


class KnownPages:
    """A retriever with fixed answers, which are computed beforehand."""

    def __init__(self) -> None:
        self.images = {f"deck_{i}": _slide_image(i) for i in range(1, PAGES + 1)}
        self._hits = [_hit(f"deck_{i}", i) for i in range(1, PAGES + 1)]

    def info(self) -> IndexInfo:
        return IndexInfo(id="known", revision="1", pages=PAGES, documents=1, backend="none")

    def search(self, queries: Sequence[str], top_k: int = 10) -> list[list[PageHit]]:
        return [self._hits_from(int(query)) for query in queries]

    @cache  # noqa: B019  # one retriever a run
    def _hits_from(self, first: int) -> list[PageHit]:
        hits = [self._hits[(first + i) % PAGES] for i in range(10)]
        return [hit.model_copy(update={"rank": i}) for i, hit in enumerate(hits, 1)]

    @cache  # noqa: B019
    def page(self, page_id: str) -> Page:
        lines = [
            TextBox(
                text=f"line {i} of {page_id}: {i * 7919}",
                x1=60,
                y1=40 * i,
                x2=600,
                y2=40 * i + 20,
                letter_height=20 if i % 3 else 10,
            )
            for i in range(1, 17)
        ]
        hit = self._hits[int(page_id[5:]) - 1]
        hit_fields = hit.model_dump(exclude={"rank", "score"})
        return Page(**hit_fields, boxes=lines)

    def image(self, page_id: str) -> bytes:
        return self.images[page_id]


def _hit(page_id: str, number: int) -> PageHit:
    return PageHit(
        page_id=page_id,
        document="deck.pdf",
        page=number,
        rank=1,
        score=1.0,
        width=WIDTH,
        height=HEIGHT,
        image=f"/v1/pages/{page_id}/image",
    )


def _slide_image(seed: int) -> bytes:
    """Return a slide: blocks of color, and lines of small bars in place of letters."""
    numbers = random.Random(seed)
    slide = Image.new("RGB", (WIDTH, HEIGHT), "white")
    pen = ImageDraw.Draw(slide)
    for _ in range(6):
        x, y = numbers.randrange(WIDTH), numbers.randrange(HEIGHT)
        pen.rectangle((x, y, x + 200, y + 120), fill=tuple(numbers.choices(range(256), k=3)))
    for row in range(40, HEIGHT, 24):
        for x in range(60, WIDTH - 60, 9):
            if numbers.random() < 0.8:
                pen.rectangle((x, row, x + numbers.randrange(2, 7), row + 11), fill="black")
    written = BytesIO()
    slide.save(written, "PNG")
    return written.getvalue()


def searching(request: TurnRequest) -> str:
    """Search on each turn, and complete on the last one."""
    if request.turn == TURNS:
        return COMPLETE
    number = int(request.trajectory_id.partition("/")[0]) * 3 + request.turn * 11
    return _text(number % PAGES)


def _text(number: int) -> str:
    return f"<think>{'word ' * 40}</think>\n<search>{number}</search>"


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield seconds and memory of a run, milliseconds of its parts."""
    episodes = 100 if quick else 1000
    pages = KnownPages()
    yield from _images(pages)
    script = ScriptPolicy(searching)
    yield from _driver(pages, episodes, "image", lambda: script, quick)
    yield from _driver(pages, episodes, "text", lambda: script, quick)
    yield from _driver(pages, episodes, "text", _of_ids, quick)


def _images(pages: KnownPages) -> Iterator[Measurement]:
    sight = SightConfig()
    image = pages.image("deck_1")
    full_page = page_view("deck_1", image, sight)
    numbers = random.Random(0)

    def crop() -> ShownImage:
        x, y = numbers.randrange(500), numbers.randrange(250)
        cut = crop_view(full_page.view, (x, y, x + 200, y + 120), image, sight)
        assert isinstance(cut, ShownImage)
        return cut

    page_ms = _median_ms(lambda: page_view("deck_1", image, sight))
    yield Measurement("a page: read, resized to 840 x 448, written as PNG", page_ms, "ms")
    yield Measurement("a crop: the same of a part of it", _median_ms(crop), "ms")


def _median_ms(work: Callable[[], Any]) -> float:
    """Return the median milliseconds of processor time."""
    times = []
    for _ in range(21):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return 1000 * statistics.median(times)


class KnownSampler:
    """A sampler that returns the script's ids at once: a new query each turn, then the end."""

    def __init__(self, tokenizer: Any) -> None:
        texts = [_text(number) for number in range(PAGES)] + [COMPLETE]
        read = tokenizer(texts, add_special_tokens=False)["input_ids"]
        self._ids = [[*ids, tokenizer.eos_token_id] for ids in read]
        self._stop = tokenizer.eos_token_id

    async def complete(
        self, prompt: SeededPrompt, gen_cfg: SamplingConfig, *, with_logprobs: bool
    ) -> SampledCompletion:
        prompt_ids = list(prompt.ids)
        turn = prompt_ids.count(self._stop) // 2  # one ends the system's message, one the question
        episode = sum(prompt_ids[: prompt_ids.index(self._stop, prompt_ids.index(self._stop) + 1)])
        ids = self._ids[-1 if turn == TURNS else (episode * 3 + turn * 11) % PAGES]
        return SampledCompletion(ids, [-1.0] * len(ids))

    def sync_weights(self, model: Any, update: int) -> None:
        """Do nothing: there are no weights."""

    def stats(self) -> dict[str, float | int | None]:
        """Return no stats."""
        return {}

    def close(self) -> None:
        """Do nothing: nothing is open."""


def _of_ids() -> Policy:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "demo/models/roleplay_policy")
    ids = TurnTokenizer(tokenizer, ChatConfig(), None, [tokenizer.eos_token_id])
    sampler = KnownSampler(tokenizer)
    return SampledPolicy(sampler, ids, SamplingConfig(), name="ids", context=2**20)


def _driver(
    pages: KnownPages,
    episodes: int,
    observation: str,
    policy: Callable[[], Policy],
    quick: bool,
) -> Iterator[Measurement]:
    jobs = [
        Question(id=str(i), question=f"What is {i}?", reference_answer="", gold=("deck_1",))
        for i in range(episodes)
    ]
    config = {"max_turns": TURNS, "max_response_length": 10**6, "observation": observation}
    cfg = EpisodeConfig.model_validate(config)
    finished: list[Trajectory] = []
    stored: set[str] = set()

    def once() -> None:
        finished.clear()
        run_episodes(
            jobs,
            policy(),
            pages,
            cfg,
            new_id=lambda question, sample: f"{question.id}/{sample}",
            on_done=finished.append,
            save_image=lambda name, png: stored.add(name),
        )

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before = _memory_mib("VmRSS")
    wall_s, cpu_s = [], []
    for _ in range(1 if quick else 3):
        started = time.process_time()
        wall_s.append(timed(once))
        cpu_s.append(time.process_time() - started)
    peak = _memory_mib("VmHWM") - before
    turns = episodes * TURNS
    assert all(episode.end == "complete" and len(episode.turns) == TURNS for episode in finished)
    page_ms = _median_ms(lambda: page_view("d", pages.image("deck_1"), cfg.sight))
    yield Measurement(
        f"{episodes:,} episodes of {TURNS} turns, {policy().name}, observation {observation}",
        statistics.median(cpu_s),
        "s of processor time",
        note=f"of it up to {len(stored) * page_ms / 1000:.1f} s for {len(stored)} pages",
        details={"cpu_s": cpu_s, "wall_s": wall_s},
    )
    yield Measurement("  a turn", 1000 * statistics.median(cpu_s) / turns, "ms")
    yield Measurement("  memory above the start, at its peak", peak, "MiB")


def _memory_mib(name: str) -> float:
    """Return the memory of this process, from Linux's own count."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


if __name__ == "__main__":
    quiet_logs()
    run("search_episodes", __doc__, questions)
