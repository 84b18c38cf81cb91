"""Episodes with images, and servers that answer and judge them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.search.answer.config import AnsweringConfig
from trainer.search.answer.pipeline import AnswerPipeline
from trainer.search.records import ImageView, Question, Trajectory, Turn

if TYPE_CHECKING:
    from testing.openai_server import FakeOpenAI

PICTURES: dict[str, bytes] = {}


def image_hash(name: str) -> str:
    """Return the SHA-256 of the image with that name; `PICTURES` has its bytes."""
    data = f"\x89PNG {name}".encode("latin-1")
    key = hashlib.sha256(data).hexdigest()
    PICTURES[key] = data
    return key


def view(name: str) -> ImageView:
    """Return a view: `deck_1` is a page, `deck_1/a` a crop of it.

    A third part distinguishes images of one view: `deck_1//small`.
    """
    page, _, detail = name.partition("/")
    kind = "crop" if detail and not detail.startswith("/") else "page"
    size = {"width": 100, "height": 50, "page_width": 200, "page_height": 100}
    region = (0.0, 0.0, 200.0, 100.0)
    images = {"image": image_hash(name), "original": image_hash(name)}
    return ImageView(kind=kind, page_id=page, region=region, **images, **size)


def episode(
    *view_names: str,
    end: str = "complete",
    question: str = "How much?",
    id: str = "t1",
    **fields: Any,
) -> Trajectory:
    """Return an episode with one view per turn."""
    turns = [
        Turn(number=n, text="", action="search", views=[view(name)])
        for n, name in enumerate(view_names, 1)
    ]
    asked_question = Question(
        id="q1", question=question, reference_answer=fields.pop("reference", "12 %")
    )
    return Trajectory(
        trajectory_id=id,
        run="run",
        step=1,
        group="q1",
        question=asked_question,
        turns=turns,
        end=end,
        **fields,
    )


@contextmanager
def serving(
    answer: Any = "12 percent",
) -> Iterator[tuple[FakeOpenAI, dict[str, dict[str, Any]]]]:
    """Serve a generator that answers `answer`, and a judge by rules; yield the config that names
    both.

    answer: a text, or a function of body and seed.
    """
    # The processes of a run, which use this module, too, load no server.
    from testing.judge import running_judge
    from testing.openai_server import FakeOpenAI

    respond = answer if callable(answer) else lambda body, seed: answer
    fake = FakeOpenAI("generator", respond=respond)
    with fake.running() as url, running_judge() as judge:
        generator = {"base_url": url, "model": "generator", "max_attempts": 1}
        yield fake, {"generator": generator, "judge": {"url": judge, "deadline_s": 5.0}}


def answering(
    config: dict[str, Any], folder: Path, run: str = "run", **sections: Any
) -> AnswerPipeline:
    """Return the answer pipeline of a config; `sections` replace or extend its sections."""
    parts = dict(config)
    for name, changes in sections.items():
        parts[name] = parts.get(name, {}) | changes if isinstance(changes, dict) else changes
    return AnswerPipeline(AnsweringConfig.model_validate(parts), run=run, folder=folder)
