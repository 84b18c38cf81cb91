"""The verifier: a model that answers from the gold pages, and quotes what it has read there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from scorekit.client.transport import checked_url
from scorekit.errors import UserError
from scorekit.llm import Choice, LLMError, Message, image_part, parse_json, text_part
from trainer.search.answer.config import ChatModelConfig
from trainer.search.answer.generator import reckoned_words
from trainer.search.answer.paid_chat import PaidChat
from trainer.search.curation.verification.config import VerifierConfig
from trainer.search.curation.verification.quotes import QuoteCheck

#: In keys and charges.
VERIFIER = "verifier"
#: Of its answer. Lengths are checked here: some servers refuse a schema that names them.
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "sure": {"type": "boolean"},
        "answer": {"type": "string"},
        "evidence": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"picture": {"type": "integer"}, "quote": {"type": "string"}},
                "required": ["picture", "quote"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["sure", "answer", "evidence"],
    "additionalProperties": False,
}
_LONGEST, _QUOTES = 2000, 20  # characters of a text, and quotes, at most
_HERE = ("localhost", "127.0.0.1", "::1", "0.0.0.0")


@dataclass(frozen=True, slots=True)
class Opinion:
    """What it says of a question. evidence: (number of the picture, from 1; words on it). quotes:
    whether each stands on its page; empty before that was looked at."""

    sure: bool
    answer: str
    evidence: tuple[tuple[int, str], ...] = ()
    quotes: tuple[QuoteCheck, ...] = ()

    @property
    def unfounded(self) -> bool:
        """Whether it is sure by words that are not on the page."""
        return self.sure and "not on the page" in self.quotes


class Verifier:
    """Asks it. chat: of the name `VERIFIER`."""

    def __init__(self, chat: PaidChat) -> None:
        self._chat = chat

    async def opinion(
        self, question: str, pictures: Mapping[str, bytes], sample: int
    ) -> Opinion | None:
        """One of several, each asked for, and kept, by itself; None where its answer is none: cut,
        kept back, or not of the form. pictures: SHA-256 -> PNG.

        Raises LLMError or TimeoutError where no answer was got in time, UserError, MoneySpent.
        """
        cfg = self._chat.cfg
        names = {"model", "api", "system", "effort", "temperature", "max_output_tokens"}
        said, _ = await self._chat.ask(
            [question, list(pictures), cfg.model_dump(include=names), SCHEMA, sample],
            lambda: _messages(cfg.system, question, pictures),
            words=verifier_words(cfg, question),
            num_images=len(pictures),
            schema=SCHEMA,
            seed=sample or None,
        )
        return None if said.text is None else read_opinion(said.text, len(pictures))


def verifier_words(cfg: ChatModelConfig, question: str) -> int:
    """Tokens of instructions, question and schema at most."""
    return reckoned_words(cfg.system + str(SCHEMA), question)


def _messages(system: str, question: str, pictures: Mapping[str, bytes]) -> Sequence[Message]:
    shown = [image_part(png) for png in pictures.values()]
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": [text_part(question), *shown]},
    ]


def read_opinion(text: str, pictures: int) -> Opinion | None:
    """The opinion in a text; None where it is not of the form: no JSON of the schema, a picture
    that it was not shown, texts without end, or a sure answer without words or without evidence."""
    try:
        found = parse_json(Choice(0, text, "stop", None), SCHEMA)
    except LLMError:
        return None
    answer = found["answer"].strip()
    evidence = tuple((int(one["picture"]), one["quote"].strip()) for one in found["evidence"])
    texts = [answer, *(quote for _, quote in evidence)]
    if len(evidence) > _QUOTES or max(map(len, texts)) > _LONGEST:
        return None
    if not all(1 <= number <= pictures and quote for number, quote in evidence):
        return None
    if found["sure"] and not (answer and evidence):
        return None
    return Opinion(found["sure"], answer, evidence)


def check_independent(verifier: VerifierConfig, generator: ChatModelConfig) -> None:
    """Raise UserError where none is named, or it is the generator itself: that one would confirm
    its own mistakes."""
    if not verifier.base_url:
        raise UserError("verify.verifier.base_url: name the server of a model to verify with")
    if not verifier.model:
        raise UserError("verify.verifier.model: name the model that the server at base_url serves")
    same = verifier.model.strip() == generator.model.strip()
    if same and _place(verifier.base_url) == _place(generator.base_url):
        raise UserError(
            f"verify.verifier: is the generator ({generator.model} at {generator.base_url}), which "
            "would confirm its own mistakes: name another model"
        )


def _place(url: str) -> tuple[str, int | None, str]:
    """Host, port and path, this machine by one name."""
    parts = urlsplit(checked_url(url))
    host = (parts.hostname or "").lower()
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return "localhost" if host in _HERE else host, port, parts.path.rstrip("/")
