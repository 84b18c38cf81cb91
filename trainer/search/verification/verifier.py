"""The verifier: a model that answers from the gold pages and quotes its evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from scorekit.client.transport import checked_url
from scorekit.errors import UserError
from scorekit.llm import Choice, LLMError, parse_json
from trainer.search.answer.config import ChatModelConfig
from trainer.search.answer.models import CachedChat, estimated_words, image_messages
from trainer.search.curation.config_sections import VerifierConfig
from trainer.search.curation.reanswer import object_schema
from trainer.search.verification.quotes import QuoteCheck

#: The name in keys and charges.
VERIFIER = "verifier"
#: The schema of its answer. Lengths are checked here, because some servers refuse them.
SCHEMA: Final = object_schema(
    sure={"type": "boolean"},
    answer={"type": "string"},
    evidence={
        "type": "array",
        "items": object_schema(picture={"type": "integer"}, quote={"type": "string"}),
    },
)
_LONGEST, _QUOTES = 2000, 20  # max characters of a text, and max quotes
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1", "0.0.0.0")


@dataclass(frozen=True, slots=True)
class Opinion:
    """An answer of the verifier. evidence: (number of the image, from 1; quote). quotes: the check
    of each quote; empty before the check."""

    sure: bool
    answer: str
    evidence: tuple[tuple[int, str], ...] = ()
    quotes: tuple[QuoteCheck, ...] = ()

    @property
    def unfounded(self) -> bool:
        """Return whether it is sure and quotes words that are not on the page."""
        return self.sure and "not on the page" in self.quotes


async def ask_verifier(
    chat: CachedChat, question: str, pngs: Mapping[str, bytes], sample: int
) -> Opinion | None:
    """Return the opinion with number `sample`; each has its own request and cache entry.

    None for an invalid answer: truncated, filtered, or not of the schema. chat: with the name
    `VERIFIER`. pngs: SHA-256 -> PNG. Raises LLMError or TimeoutError without an answer in time,
    UserError, BudgetExceeded.
    """
    cfg = chat.cfg
    reply, _ = await chat.ask(
        [question, list(pngs), chat.settings(), SCHEMA, sample],
        lambda: image_messages(cfg.system, question, pngs),
        words=verifier_words(cfg, question),
        num_images=len(pngs),
        schema=SCHEMA,
        seed=sample or None,
    )
    return None if reply.text is None else read_opinion(reply.text, len(pngs))


def verifier_words(cfg: ChatModelConfig, question: str) -> int:
    """Return the max tokens of instructions, question and schema."""
    return estimated_words(cfg.system + str(SCHEMA), question)


def read_opinion(text: str, num_images: int) -> Opinion | None:
    """Return the opinion in a text, or None if it is invalid.

    Invalid: no JSON of the schema, an unknown image number, overlong texts, or a sure answer
    without text or evidence.
    """
    try:
        parsed = parse_json(Choice(0, text, "stop", None), SCHEMA)
    except LLMError:
        return None
    answer = parsed["answer"].strip()
    evidence = tuple(
        (int(entry["picture"]), entry["quote"].strip()) for entry in parsed["evidence"]
    )
    texts = [answer, *(quote for _, quote in evidence)]
    if len(evidence) > _QUOTES or max(map(len, texts)) > _LONGEST:
        return None
    if not all(1 <= number <= num_images and quote for number, quote in evidence):
        return None
    if parsed["sure"] and not (answer and evidence):
        return None
    return Opinion(parsed["sure"], answer, evidence)


def check_independent(verifier: VerifierConfig, generator: ChatModelConfig) -> None:
    """Raise UserError if there is no verifier, or if it is the generator.

    The generator would confirm its own mistakes.
    """
    if not verifier.base_url:
        raise UserError(
            "verify.verifier.base_url: not set. Name the server of a model to verify with."
        )
    if not verifier.model:
        raise UserError(
            "verify.verifier.model: not set. Name the model that the server at base_url serves."
        )
    same = verifier.model.strip() == generator.model.strip()
    if same and _location(verifier.base_url) == _location(generator.base_url):
        raise UserError(
            f"verify.verifier: it is the generator ({generator.model} at {generator.base_url}), "
            "which would confirm its own mistakes. Name another model."
        )


def _location(url: str) -> tuple[str, int | None, str]:
    """Return host, port and path, with one name for this machine."""
    parts = urlsplit(checked_url(url))
    host = (parts.hostname or "").lower()
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return "localhost" if host in _LOCAL_HOSTS else host, port, parts.path.rstrip("/")
