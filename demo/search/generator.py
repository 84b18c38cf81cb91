"""`python -m demo.search.generator`: a frozen generator for the search demo, where there is none.

A server in OpenAI's form: /v1/models, /v1/chat/completions and /v1/responses, pictures as data
URLs. It is no model: it reads the pictures of the demo's corpus (`demo.search.reading`) and answers
the demo's questions from what is legible in them, and always the same. Sampling changes nothing.
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
_LETTERS = 4  # a token
_PIXELS = 28 * 28  # a token of a picture
_FORMATS = ("PNG", "JPEG", "WEBP")
_LARGEST = 50_000_000  # pixels of a picture
_PICTURES = 64  # that are kept read: the same pages come again and again


class ImageURL(BaseModel):
    """Of a part of a chat's message."""

    url: str


class Part(BaseModel):
    """A text or a picture of a message, in the form of either API."""

    type: Literal["text", "image_url", "input_text", "output_text", "input_image"]
    text: str = ""
    image_url: ImageURL | str | None = None


class Message(BaseModel):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]


class ChatRequest(BaseModel):
    """A body of /v1/chat/completions; what is not named here changes nothing."""

    model: str
    messages: list[Message] = Field(min_length=1)
    n: Literal[1] = 1
    seed: int | None = None
    stream: Literal[False] = False
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)


class ResponsesRequest(BaseModel):
    """A body of /v1/responses; what is not named here changes nothing."""

    model: str
    input: str | list[Message] = Field(min_length=1)
    instructions: str | None = None
    stream: Literal[False] = False
    max_output_tokens: int | None = Field(None, ge=1)


class Said(NamedTuple):
    """An answer. cut: by the request's limit."""

    text: str
    cut: bool
    prompt_tokens: int
    tokens: int


def create_app(
    *, name: str = NAME, api_key: str | None = None, answerer: Answerer | None = None
) -> FastAPI:
    """The ASGI app over the demo's corpus. api_key: None lets everyone in. answerer: another one
    than the demo's."""
    app = new_app()
    one_thread = ThreadPoolExecutor(1, "reading")
    answerer = answerer or Answerer()

    def check(request: Request, model: str) -> None:
        check_key(request, api_key)
        if model != name:
            raise Refused(404, f"The model `{model[:80]}` does not exist.")

    async def say(messages: list[Message], most: int | None, seed: int | None = None) -> Said:
        text, pictures = _contents(messages)
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(one_thread, answerer.answer, text, pictures, seed)
        tokens = -(-len(answer) // _LETTERS)
        kept = min(tokens, most or tokens)
        sent = len(text) // _LETTERS + sum(map(_picture_tokens, pictures))
        return Said(answer[: kept * _LETTERS], kept < tokens, sent, kept)

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        check(request, name)
        return {"object": "list", "data": [{"id": name, "object": "model"}]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> dict[str, Any]:
        check(request, body.model)
        most = body.max_completion_tokens or body.max_tokens
        return _completion(name, await say(body.messages, most, body.seed))

    @app.post("/v1/responses")
    async def responses(request: Request, body: ResponsesRequest) -> dict[str, Any]:
        check(request, body.model)
        messages = body.input
        if isinstance(messages, str):
            messages = [Message(role="user", content=messages)]
        if body.instructions is not None:
            messages = [Message(role="system", content=body.instructions), *messages]
        return _response(name, await say(messages, body.max_output_tokens))

    return app


def _contents(messages: list[Message]) -> tuple[str, list[bytes]]:
    """The text of all turns, and the pictures in their order."""
    texts, pictures = [], []
    for message in messages:
        if isinstance(message.content, str):
            texts.append(message.content)
            continue
        for part in message.content:
            if part.image_url is None:
                texts.append(part.text)
            else:
                url = part.image_url
                pictures.append(_picture(url if isinstance(url, str) else url.url))
    return "\n".join(texts), pictures


@lru_cache(_PICTURES)
def _picture(url: str) -> bytes:
    """The bytes of a data URL. Raises Refused for what is none, or holds no picture."""
    head, _, data = url.partition(",")
    if not (head.startswith("data:image/") and head.endswith(";base64")):
        raise Refused(400, "image_url: only base64 data URLs are read")
    try:
        picture = base64.b64decode(data, validate=True)
        with Image.open(io.BytesIO(picture), formats=_FORMATS) as opened:
            if opened.width * opened.height > _LARGEST:
                raise Refused(400, f"image_url: more than {_LARGEST} pixels")
            opened.load()
    except (binascii.Error, UnidentifiedImageError, OSError, Image.DecompressionBombError):
        raise Refused(400, "image_url: no picture that can be read") from None
    return picture


def _picture_tokens(picture: bytes) -> int:
    with Image.open(io.BytesIO(picture)) as opened:
        return opened.width * opened.height // _PIXELS


def _completion(name: str, said: Said) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": said.text},
        "finish_reason": "length" if said.cut else "stop",
    }
    usage = {
        "prompt_tokens": said.prompt_tokens,
        "completion_tokens": said.tokens,
        "total_tokens": said.prompt_tokens + said.tokens,
    }
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion"}
    return head | {"created": int(time.time()), "model": name, "choices": [choice], "usage": usage}


def _response(name: str, said: Said) -> dict[str, Any]:
    part = {"type": "output_text", "text": said.text, "annotations": []}
    message = {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "status": "incomplete" if said.cut else "completed",
        "content": [part],
    }
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": name,
        "status": message["status"],
        "incomplete_details": {"reason": "max_output_tokens"} if said.cut else None,
        "output": [message],
        "usage": {
            "input_tokens": said.prompt_tokens,
            "output_tokens": said.tokens,
            "total_tokens": said.prompt_tokens + said.tokens,
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

    with clean_exit():
        check_host(host, api_key, "GENERATOR_API_KEY")
        app = create_app(name=served_model_name, api_key=api_key)
        uvicorn.run(app, host=host, port=port, log_level="warning")


if __name__ == "__main__":
    typer.run(main)
