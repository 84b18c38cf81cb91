"""Requests of all sizes, with texts that are expensive for a tokenizer, a parser or a rule."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

MAX_CHARS, MAX_SAMPLES, MAX_BODY = 100_000, 10_000, 16 * 2**20
#: What texts are made of, repeated: words, scripts without spaces, unknown characters, one space
#: after another, marks that pile up, characters that JSON escapes, widths of 1, 2 and 4 bytes.
UNITS = (
    "The house is red. ",
    "집은 빨간색이다. ",
    "日本語の文章です。",
    "龘靐",
    "😀",
    " ",
    "a",
    "a-",
    "\u0301",
    "\u0001",
    '"\\',
    "<b> ",
    "1,000.5 ",
    "\n",
    "ａｂｃ ",
    "مرحبا ",
    "e\u0301 ",
    "▁",
    "\u200d",
    "{[,",
)
LIMITS = {"metricx": 1536, "xcomet": 512}


@dataclass(frozen=True, slots=True)
class Case:
    """A request at a limit.

    status: the expected status of the response.

    error_type: the expected error of its first sample; None if it must be scored.
    """

    name: str
    body: bytes
    status: int = 200
    error_type: str | None = None


def encoded(request: dict[str, Any], *, ascii: bool = False) -> bytes:
    """Return the request as JSON."""
    return json.dumps(request, ensure_ascii=ascii).encode()


def sample(service: str, source: str, translation: str) -> dict[str, Any]:
    """Return one sample of a service."""
    if service != "judge":
        return {"src": source, "mt": translation}
    return {
        "task": "translation_filter",
        "source_lang": "en",
        "target_lang": "ko",
        "source_text": source,
        "candidate": translation,
    }


def random_text(rng: random.Random, length: int) -> str:
    """Return a text of about `length` characters of one or two kinds; no text repeats."""
    text = "".join(unit * (length // (2 * len(unit)) + 1) for unit in rng.choices(UNITS, k=2))
    return f"{rng.random()}{text}"[: max(length, 1)]


def random_request(rng: random.Random, service: str, large: bool) -> bytes:
    """Return a legal request: of 5 to 16 MB, or of up to some hundred kB."""
    target = rng.randrange(5_500_000, 15_500_000) if large else int(10 ** rng.uniform(1, 5.5))
    samples: list[dict[str, Any]] = []
    size = 0
    length = int(10 ** rng.uniform(0 if not large else 3, 5))
    as_ascii = rng.random() < 0.2
    while size < target and len(samples) < MAX_SAMPLES:
        if samples and rng.random() < 0.3:
            body_sample = dict(rng.choice(samples))
        else:
            source, translation = (random_text(rng, rng.randint(1, length)) for _ in "ab")
            body_sample = sample(service, source, translation)
            if service != "judge" and rng.random() < 0.3:
                body_sample["ref"] = random_text(rng, rng.randint(0, length))
        if rng.random() < 0.5:
            body_sample["id"] = random_text(rng, rng.randint(0, 50))
        cost = len(encoded(body_sample, ascii=as_ascii)) + 1
        if size + cost > MAX_BODY - 1000:
            break
        samples.append(body_sample)
        size += cost
    request: dict[str, Any] = {
        "samples": samples or [sample(service, "a", "b")],
        "timeout_s": rng.choice([0.5, 1, 2]),
        "priority": rng.choice(["interactive", "bulk"]),
        "options": {"cache": rng.random() < 0.7},
    }
    if service != "judge":
        request["options"] |= {
            "overlong": rng.choice(["truncate", "error", "windows"]),
            "max_input_length": rng.choice([None, 16, LIMITS[service]]),
        }
    return encoded(request, ascii=as_ascii)


def _common(service: str) -> Iterator[Case]:
    """Yield the limits that every service has."""
    valid_sample = sample(service, "The house is red.", "집은 빨간색이다.")
    for count, status in ((0, 422), (1, 200), (MAX_SAMPLES, 200), (MAX_SAMPLES + 1, 413)):
        yield Case(f"samples: {count}", encoded({"samples": [valid_sample] * count}), status)
    for seconds, status in ((0, 422), (1, 200), (86400, 200), (86401, 422)):
        yield Case(
            f"timeout_s: {seconds}",
            encoded({"samples": [valid_sample], "timeout_s": seconds}),
            status,
        )
    for length in (0, 1, 100_000, 10_000_000):  # has no limit of its own
        yield Case(f"id: {length}", encoded({"samples": [valid_sample | {"id": "i" * length}]}))
    body = encoded({"samples": [valid_sample]})
    for size, status in ((0, 422), (1, 422), (MAX_BODY, 200), (MAX_BODY + 1, 413)):
        padded = body + b" " * (size - len(body)) if size >= len(body) else body[:size]
        yield Case(f"body: {size}", padded, status)


def _translations(service: str) -> Iterator[Case]:
    yield from _common(service)
    valid_sample = sample(service, "The house is red.", "집은 빨간색이다.")
    for name in ("src", "mt", "ref"):
        for length in (0, 1, MAX_CHARS, MAX_CHARS + 1):
            error_type = "invalid_input" if length > MAX_CHARS else None
            text = ("word " * (length // 5 + 1))[:length]
            yield Case(
                f"{name}: {length}",
                encoded({"samples": [valid_sample | {name: text}]}),
                200,
                error_type,
            )
    max_length = LIMITS[service]
    for length, status in (
        (0, 422),
        (1, 422),
        (15, 422),
        (16, 200),
        (max_length, 200),
        (max_length + 1, 422),
    ):
        options = {"max_input_length": length}
        body = encoded({"samples": [sample(service, "a", "b")], "options": options})
        yield Case(f"max_input_length: {length}", body, status)


def _judge() -> Iterator[Case]:
    yield from _common("judge")
    for name in ("source_text", "candidate"):
        for length in (1, MAX_CHARS, MAX_CHARS + 1):
            texts = {"source_text": "The house is red.", "candidate": "집은 빨간색이다."}
            texts[name] = ("word " * (length // 5 + 1))[:length]
            judged_sample = sample("judge", texts["source_text"], texts["candidate"])
            error_type = "invalid_input" if length > MAX_CHARS else None
            yield Case(f"{name}: {length}", encoded({"samples": [judged_sample]}), 200, error_type)
    judged_sample = sample("judge", "The house is red.", "집은 빨간색이다.")
    for option, value, status in (
        ("max_tokens", 0, 422),
        ("max_tokens", 1, 200),
        ("max_tokens", 32768, 200),
        ("max_tokens", 32769, 422),
        ("temperature", 0, 200),
        ("temperature", 1, 200),
        ("temperature", 2, 200),
        ("temperature", 2.01, 422),
        ("model", "", 422),
        ("model", "m" * 201, 422),
    ):
        body = encoded({"samples": [judged_sample], "options": {option: value}})
        yield Case(f"{option}: {value!r:.20}", body, status)


#: Service -> its requests at the limits.
BOUNDARIES: dict[str, Callable[[], list[Case]]] = {
    "metricx": lambda: list(_translations("metricx")),
    "xcomet": lambda: list(_translations("xcomet")),
    "judge": lambda: list(_judge()),
}
