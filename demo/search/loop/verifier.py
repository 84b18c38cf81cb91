"""`python -m demo.search.loop.verifier`: a verifier for the search demo, in place of a real one.

It is a server in OpenAI's format, as `demo.search.generator` is, but a separate program. It answers
in JSON. Its evidence is the text that it has read. If a figure is not legible, it says that it is
not sure.

It makes errors on purpose, so that measurements with it mean something. For a share of its answers
it reads another figure of the page than the right one. For another share it says that it is not
sure although it could be. Half of the wrong answers are wrong in every request; the others depend
on the request's seed. So asking again helps with only some of its errors, as with a real model.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Sequence
from typing import Annotated

import typer

from demo.openai_form import LOOPBACK, check_host
from demo.search.answer_keys import Key
from demo.search.answering import Answerer
from demo.search.generator import create_app
from demo.search.reading import Sight
from scorekit.command import clean_exit

NAME = "demo-verifier"
_STUBBORN = 0.5  # of the errors


class Verifying(Answerer):
    """Answers with errors.

    error, unsure: shares of the questions that it could answer.
    seed: of its errors.
    """

    def __init__(self, *, error: float = 0.1, unsure: float = 0.05, seed: int = 0) -> None:
        super().__init__()
        self._error, self._unsure, self._error_seed = error, unsure, seed

    def answer(self, text: str, images: Sequence[bytes], seed: int | None = None) -> str:
        """Return JSON with sure, answer and evidence.

        seed: of the request.
        """
        return self.answer_seeing(text, list(map(self.reader.locate, images)), seed or 0)

    def answer_seeing(self, text: str, sights: Sequence[Sight | None], seed: int) -> str:
        """Answer from the regions that the images show; None for an image of no page."""
        key = self.key_of(text)
        seen = [sight for sight in sights if sight is not None]
        read = self.read(key, seen) if key else None
        if key is None or read is None:
            return _as_json(False, "The pages do not settle it.", [])
        always = self._draw(key.question, None)
        now = self._draw(key.question, seed)
        often = (1 - _STUBBORN) * self._error / (1 - _STUBBORN * self._error)
        # one draw after the other: whoever errs more errs on the same questions, too
        is_wrong, now_wrong = always.random() < _STUBBORN * self._error, now.random() < often
        if now.random() < self._unsure:
            return _as_json(False, key.answer(read), [])
        if is_wrong or now_wrong:
            read = self._misread(key, read, seen, always if is_wrong else now)
        image_numbers = [_image_number(sights, spots[0].page_id) for spots in key.reads]
        return _as_json(True, key.answer(read), list(zip(image_numbers, read, strict=True)))

    def _misread(
        self, key: Key, read: Sequence[str], sights: Sequence[Sight], draw: random.Random
    ) -> list[str]:
        """Replace one number that was read by another one on the pages, so that the answer is
        wrong.
        """
        number_pattern = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
        lines = [line for line in self.reader.legible(sights) if number_pattern.fullmatch(line)]
        draw.shuffle(lines)
        for line in lines:
            for index in range(len(read)):
                other = [*read[:index], line, *read[index + 1 :]]
                if key.answer(other) != key.answer(read):
                    return other
        return list(read)

    def _draw(self, question: str, seed: int | None) -> random.Random:
        text = f"{self._error_seed} {seed} {question}"
        return random.Random(hashlib.sha256(text.encode()).digest())


def _image_number(sights: Sequence[Sight | None], page_id: str) -> int:
    """Return the 1-based number of the image that shows a page."""
    numbers = (n for n, sight in enumerate(sights, 1) if sight and sight.page.page_id == page_id)
    return next(numbers, 1)


def _as_json(sure: bool, answer: str, evidence: Sequence[tuple[int, str]]) -> str:
    quotes = [{"picture": number, "quote": quote} for number, quote in evidence]
    return json.dumps({"sure": sure, "answer": answer, "evidence": quotes}, ensure_ascii=False)


def main(
    host: Annotated[str, typer.Option(help="Address; any but this one needs a key.")] = LOOPBACK,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8011,
    served_model_name: Annotated[str, typer.Option(help="Its name in requests.")] = NAME,
    error: Annotated[float, typer.Option(min=0, max=1, help="Share of wrong answers.")] = 0.1,
    unsure: Annotated[float, typer.Option(min=0, max=1, help="Share not sure of.")] = 0.05,
    seed: Annotated[int, typer.Option(help="Of its errors.")] = 0,
    api_key: Annotated[
        str | None, typer.Option(envvar="VERIFIER_API_KEY", help="Key that clients must send.")
    ] = None,
) -> None:
    """Serve the search demo's verifier in OpenAI's form."""
    import uvicorn

    with clean_exit(stdout="log"):
        check_host(host, api_key, "VERIFIER_API_KEY")
        answerer = Verifying(error=error, unsure=unsure, seed=seed)
        app = create_app(name=served_model_name, api_key=api_key, answerer=answerer)
        uvicorn.run(app, host=host, port=port, log_level="warning")


if __name__ == "__main__":
    typer.run(main)
