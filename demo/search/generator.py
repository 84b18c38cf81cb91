"""`python -m demo.search.generator`: a frozen generator for the search demo.

An OpenAI-compatible server: /v1/models, /v1/chat/completions and /v1/responses, with images as
data URLs. It is not a model: it reads the images of the demo's corpus (`demo.search.reading`) and
answers the demo's questions from what is legible in them. Its answers are deterministic: sampling
options change nothing.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple

import typer
from fastapi import FastAPI, Request
from PIL import Image, UnidentifiedImageError
from pydantic import BaseModel, Field

from demo.openai_form import LOOPBACK, Refused, check_host, check_key, new_app
from demo.search.answering import Answerer
from scorekit.command import clean_exit

NAME = "demo-generator"
_LETTERS = 4  # per text token
_PIXELS = 28 * 28  # per image token
_FORMATS = ("PNG", "JPEG", "WEBP")
_LARGEST = 50_000_000  # pixels of a picture
_CACHED_IMAGES = 64  # decoded images in the cache: the same pages are sent repeatedly


class ImageURL(BaseModel):
    """Holds the `image_url` field of a message part."""

    url: str


class Part(BaseModel):
    """Holds a text or an image of a message, in the format of either API."""

    type: Literal["text", "image_url", "input_text", "output_text", "input_image"]
    text: str = ""
    image_url: ImageURL | str | None = None


class Message(BaseModel):
    """Holds one turn of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]


class ChatRequest(BaseModel):
    """Holds the body of a /v1/chat/completions request. Other fields are ignored."""

    model: str
    messages: list[Message] = Field(min_length=1)
    n: Literal[1] = 1
    seed: int | None = None
    stream: Literal[False] = False
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)


class ResponsesRequest(BaseModel):
    """Holds the body of a /v1/responses request. Other fields are ignored."""

    model: str
    input: str | list[Message] = Field(min_length=1)
    instructions: str | None = None
    stream: Literal[False] = False
    max_output_tokens: int | None = Field(None, ge=1)


class GeneratedAnswer(NamedTuple):
    """Holds an answer.

    cut: whether the request's token limit cut it.
    """

    text: str
    cut: bool
    prompt_tokens: int
    tokens: int


def create_app(
    *, name: str = NAME, api_key: str | None = None, answerer: Answerer | None = None
) -> FastAPI:
    """Return the ASGI app over the demo's corpus.

    api_key: None allows every client.
    answerer: replaces the demo's answerer.
    """
    app = new_app()
    one_thread = ThreadPoolExecutor(1, "reading")
    answerer = answerer or Answerer()

    def check(request: Request, model: str) -> None:
        check_key(request, api_key)
        if model != name:
            raise Refused(404, f"The model `{model[:80]}` does not exist.")

    async def generate_answer(
        messages: list[Message], max_tokens_requested: int | None, seed: int | None = None
    ) -> GeneratedAnswer:
        text, images = _contents(messages)
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(one_thread, answerer.answer, text, images, seed)
        tokens = -(-len(answer) // _LETTERS)
        num_tokens = min(tokens, max_tokens_requested or tokens)
        sent = len(text) // _LETTERS + sum(map(_image_tokens, images))
        return GeneratedAnswer(
            answer[: num_tokens * _LETTERS], num_tokens < tokens, sent, num_tokens
        )

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        check(request, name)
        return {"object": "list", "data": [{"id": name, "object": "model"}]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> dict[str, Any]:
        check(request, body.model)
        max_tokens_requested = body.max_completion_tokens or body.max_tokens
        return _completion(
            name, await generate_answer(body.messages, max_tokens_requested, body.seed)
        )

    @app.post("/v1/responses")
    async def responses(request: Request, body: ResponsesRequest) -> dict[str, Any]:
        check(request, body.model)
        messages = body.input
        if isinstance(messages, str):
            messages = [Message(role="user", content=messages)]
        if body.instructions is not None:
            messages = [Message(role="system", content=body.instructions), *messages]
        return _response(name, await generate_answer(messages, body.max_output_tokens))

    return app


def _contents(messages: list[Message]) -> tuple[str, list[bytes]]:
    """Return the text of all turns, and the images in order."""
    texts, images = [], []
    for message in messages:
        if isinstance(message.content, str):
            texts.append(message.content)
            continue
        for part in message.content:
            if part.image_url is None:
                texts.append(part.text)
            else:
                url = part.image_url
                images.append(_decode_image(url if isinstance(url, str) else url.url))
    return "\n".join(texts), images


@lru_cache(_CACHED_IMAGES)
def _decode_image(url: str) -> bytes:
    """Return the bytes of a data URL. Raise Refused if it is not one, or holds no image."""
    head, _, data = url.partition(",")
    if not (head.startswith("data:image/") and head.endswith(";base64")):
        raise Refused(400, "image_url: only base64 data URLs are read")
    try:
        image = base64.b64decode(data, validate=True)
        with Image.open(io.BytesIO(image), formats=_FORMATS) as opened:
            if opened.width * opened.height > _LARGEST:
                raise Refused(400, f"image_url: more than {_LARGEST} pixels")
            opened.load()
    except (binascii.Error, UnidentifiedImageError, OSError, Image.DecompressionBombError):
        raise Refused(400, "image_url: no picture that can be read") from None
    return image


def _image_tokens(image: bytes) -> int:
    with Image.open(io.BytesIO(image)) as opened:
        return opened.width * opened.height // _PIXELS


def _completion(name: str, answer: GeneratedAnswer) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": answer.text},
        "finish_reason": "length" if answer.cut else "stop",
    }
    usage = {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.tokens,
        "total_tokens": answer.prompt_tokens + answer.tokens,
    }
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion"}
    return head | {"created": int(time.time()), "model": name, "choices": [choice], "usage": usage}


def _response(name: str, answer: GeneratedAnswer) -> dict[str, Any]:
    part = {"type": "output_text", "text": answer.text, "annotations": []}
    message = {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "status": "incomplete" if answer.cut else "completed",
        "content": [part],
    }
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": name,
        "status": message["status"],
        "incomplete_details": {"reason": "max_output_tokens"} if answer.cut else None,
        "output": [message],
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "output_tokens": answer.tokens,
            "total_tokens": answer.prompt_tokens + answer.tokens,
        },
    }


def main(
    host: Annotated[str, typer.Option(help="Address; any but this one needs a key.")] = LOOPBACK,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8010,
    served_model_name: Annotated[str, typer.Option(help="Its name in requests.")] = NAME,
    api_key: Annotated[
        str | None, typer.Option(envvar="GENERATOR_API_KEY", help="Key that clients must send.")
    ] = None,
) -> None:
    """Serve the search demo's generator in OpenAI's form."""
    import uvicorn

    with clean_exit(stdout="log"):
        check_host(host, api_key, "GENERATOR_API_KEY")
        app = create_app(name=served_model_name, api_key=api_key)
        uvicorn.run(app, host=host, port=port, log_level="warning")


if __name__ == "__main__":
    typer.run(main)
