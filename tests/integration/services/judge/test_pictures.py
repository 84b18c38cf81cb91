"""Test samples with images: what a vision model gets, and what no model gets."""

from __future__ import annotations

import io
import json
import zlib
from base64 import b64decode, b64encode

import httpx
import pytest
from PIL import Image

from services.judge import fence
from testing.judge import judge, running_judge
from testing.openai_server import FakeOpenAI

VERDICT = {"score": 0.75, "reason_code": "partial", "notes": "half of it"}


def make_image(kind: str = "PNG", colour: int = 0, size: tuple[int, int] = (40, 30)) -> str:
    data = io.BytesIO()
    Image.new("RGB", size, (colour, 0, 0)).save(data, kind)
    return b64encode(data.getvalue()).decode()


def sample(*images: str, **texts: str) -> dict:
    fields = {"task": "answer_grounded", "query": "How much?", "answer": "12 %"} | texts
    return fields | {"images": list(images)}


def verdict_with_count(body, seed):
    """Return a verdict that states how many images the model saw."""
    content = body["messages"][1]["content"]
    image_parts = [part for part in content if part["type"] in ("image_url", "input_image")]
    return json.dumps(VERDICT | {"notes": f"{len(image_parts)} seen"})


@pytest.fixture(scope="module")
def served():
    fake = FakeOpenAI(respond=verdict_with_count)
    with fake.running() as upstream, running_judge(upstream=upstream) as url:
        yield fake, url, upstream


def test_a_vision_model_is_sent_the_pictures_between_texts_of_ours(served):
    fake, url, _ = served
    fake.forget()
    (result,) = judge(url, sample(make_image("PNG"), make_image("JPEG"), make_image("WEBP")))
    assert (result["score"], result["verdict"]["notes"]) == (0.75, "3 seen")
    assert result["usage"]["completion_tokens"] > 0
    system, user = fake.requests[0].body["messages"]
    assert "pictures are data" in system["content"]
    first, *image_parts, last = user["content"]
    assert "How much?" in first["text"] and last["text"].startswith("The texts end here")
    heads = [part["image_url"]["url"].partition(";")[0] for part in image_parts]
    assert heads == ["data:image/png", "data:image/jpeg", "data:image/webp"]
    sent = b64decode(image_parts[0]["image_url"]["url"].partition(",")[2])
    assert sent == b64decode(make_image("PNG"))


def encoded(image: Image.Image, kind: str = "PNG", **options) -> str:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return b64encode(data.getvalue()).decode()


def test_what_readers_treat_differently_is_sent_as_it_looks_on_paper():
    exif = Image.Exif()
    exif[0x112] = 6
    upright = Image.new("RGB", (40, 30), "white")
    deep = Image.new("I;16", (40, 30), 30_000)
    kinds = {
        encoded(Image.new("RGBA", (40, 30), (0, 0, 0, 0))): ("PNG", (255, 255, 255)),
        encoded(deep): ("PNG", (117, 117, 117)),
        encoded(upright.transpose(Image.Transpose.ROTATE_90), "JPEG", exif=exif): (
            "JPEG",
            (255, 255, 255),
        ),
        encoded(Image.new("RGBA", (40, 30), (0, 0, 0, 0)), "WEBP"): ("WEBP", (255, 255, 255)),
    }
    for image, (kind, color) in kinds.items():
        (part,) = fence.image_parts([image])
        head, _, content = part["image_url"]["url"].partition(",")
        assert head == f"data:image/{kind.lower()};base64"
        with Image.open(io.BytesIO(b64decode(content))) as sent:
            assert (sent.format, sent.mode, sent.size) == (kind, "RGB", (40, 30))
            assert sent.getpixel((20, 15)) == color and not sent.getexif()


def test_an_opaque_image_is_sent_as_it_came():
    opaque = encoded(Image.new("RGBA", (40, 30), "red"))
    (part,) = fence.image_parts([opaque])
    assert part["image_url"]["url"].endswith(opaque)


def test_other_pictures_are_another_question_to_the_cache(served):
    fake, url, _ = served
    fake.forget()
    first, repeated = (judge(url, sample(make_image(colour=1)))[0] for _ in range(2))
    assert (first["cached"], repeated["cached"]) == (False, True)
    assert first["usage"] == repeated["usage"]
    other_samples = (
        sample(make_image(colour=2)),
        sample(make_image(colour=1), make_image(colour=1)),
    )
    assert [result["cached"] for result in judge(url, *other_samples)] == [False, False]
    assert len(fake.requests) == 3


def test_an_answer_asked_for_twice_counts_both(served):
    fake, url, _ = served
    fake.forget()
    fake.respond = lambda body, seed: (
        "no JSON" if len(fake.requests) == 1 else verdict_with_count(body, seed)
    )
    try:
        (result,) = judge(url, sample(make_image(colour=3)))
    finally:
        fake.respond = verdict_with_count
    _, second = fake.requests
    assert "An earlier answer was not the JSON" in second.body["messages"][1]["content"][-1]["text"]
    assert result["usage"]["completion_tokens"] == 2 + len(
        verdict_with_count(second.body, 0).split()
    )


def test_a_judge_may_speak_the_responses_api(served):
    fake, _, upstream = served
    fake.forget()
    with running_judge(upstream=upstream, api="responses") as url:
        (result,) = judge(url, sample(make_image(colour=4)))
    assert result["score"] == 0.75
    body = fake.requests[0].body
    kinds = [part["type"] for part in body["input"][1]["content"]]
    assert kinds == ["input_text", "input_image", "input_text"]
    assert body["text"]["format"]["schema"]["required"][0] == "score"


def bomb(side: int) -> str:
    """Return a small PNG that claims to be enormous."""
    data = bytearray(b64decode(make_image()))
    data[16:24] = (side).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return b64encode(data).decode()


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ([], "the rubric requires 1 to 16"),
        ([make_image()] * 17, "the rubric requires 1 to 16"),
        (["!!"], "images.0: not base64"),
        ([make_image(), ""], "images.1: neither PNG"),
        ([make_image("GIF")], "neither PNG"),
        ([b64encode(b"<svg/>").decode()], "neither PNG"),
        ([b64encode(b"\x89PNG\r\n\x1a\n").decode()], "neither PNG"),
        (["data:image/png;base64," + make_image()], "not base64"),
        ([bomb(60_000)], "pixels"),
        ([bomb(6_000)], "6000 x 6000 pixels"),
    ],
)
def test_what_is_no_picture_fails_its_sample_and_asks_nobody(served, images, words):
    fake, url, _ = served
    fake.forget()
    bad, good = judge(url, sample(*images), sample(make_image(colour=9)))
    assert bad["error"]["type"] == "invalid_input" and words in bad["error"]["message"]
    assert good["ok"] and len(fake.requests) <= 1


def test_a_picture_of_too_many_bytes_is_refused(served, monkeypatch):
    monkeypatch.setattr(fence, "MAX_BYTES", 60)
    (result,) = judge(served[1], sample(make_image(colour=8)))
    assert "larger than 60 bytes" in result["error"]["message"]


def test_texts_alone_take_no_pictures_and_lists_are_bounded(served):
    texts = {"task": "answer_correctness", "query": "q", "answer": "a", "reference": "r"}
    (result,) = judge(served[1], texts | {"images": [make_image()]})
    assert "wants no pictures" in result["error"]["message"]
    for wrong in ([""] * 33, "AAAA", [1]):
        response = httpx.post(
            f"{served[1]}/v1/score", json={"samples": [sample() | {"images": wrong}]}
        )
        assert response.status_code == 422
