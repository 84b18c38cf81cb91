"""A fake OpenAI-compatible chat server that behaves like vLLM, for every test that needs an LLM.

    fake = FakeOpenAI(api_key="k", respond=my_answers)
    with fake.running() as base_url:            # ends in /v1
        ... LLMClient(base_url, fake.model, api_key=SecretStr("k")) ...
    fake.requests[0].body["temperature"], fake.peak_sequences, fake.choices_served

What it answers: `respond(body, seed)` gives the text of one choice; choice i of a request has the
seed `seed + i` (no seed: i; temperature 0: None, since greedy knows no seed). The default is a
few made-up words, or JSON that fits `response_format`'s schema, as a function of (messages,
temperature, seed, schema). Return None for a choice without content. A token is a word: usage
counts words, and a text of more than max_tokens words is cut with finish_reason "length".

`/v1/responses` answers the same to the same input; images come as the body has them.

What it records: `requests`, one `Recorded` a chat request in order of arrival (body, headers with
lower-case names, time, status, choices served; 0 and None until it is answered), `in_flight` and
`sequences_in_flight` now, `peak_requests` and `peak_sequences`. `forget()` clears these. With
`records=False` no request is kept: for a server that stays.

How it misbehaves, set at run time (plain attributes, from any thread):
    refuse_n            True: n > 1 is a 400. "greedy" (the default, as vLLM): only at temperature 0
    most_choices        k: answers at most k choices, whatever n is
    numbered            False: every choice has index 0
    hang                True: requests wait until it is False again (then they are answered), or
                        until their client leaves. A function of the body: those that it names
    cut                 True: half of each text, finish_reason "length"
    finish_reason       a word instead of "stop" ("abort", None), or a function of (body, seed)
    also                more fields of each message (a reasoning parser's `reasoning`)
    counts_tokens       False: chat answers have no usage
    raw                 a text that is sent, with status 200, in place of any answer
    no_template         True: vLLM's 400 for a model without a chat template
    context_length      k: a prompt whose words and max_tokens exceed k is vLLM's over-length 400
    api_key             not None: chat and /v1/models want it, else 401
    model               another name than the request's: 404
    fail(status, times=1, message="...", headers={...}): the next `times` chat requests (None: all)
                        get that status; status may also be "close" (the connection breaks off in
                        the middle of the answer), "not_json" (200 with a body that is no JSON) or
                        "no_choices" (200 with an empty list)
    well()              as new, but for model, key and what was recorded
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from testing.servers import running_app

Body = dict[str, Any]
NO_TEMPLATE = (
    "As of transformers v4.44, default chat template is no longer allowed, so you must provide a "
    "chat template if the tokenizer does not define one."
)


@dataclass
class Recorded:
    """One chat request.

    choices: how many were served.
    """

    body: Body
    headers: dict[str, str]
    time: float
    status: int | None = None
    choices: int = 0

    @property
    def id(self) -> str:
        """Return the client's name for the request."""
        return self.headers.get("x-request-id", "")


@dataclass
class _Failure:
    status: int | str
    times: int | None
    message: str
    headers: dict[str, str]
    only: Callable[[Body], bool]


def made_up(body: Body, seed: int | None) -> str:
    """Return the default answer: a function of (messages, temperature, seed, schema)."""
    schema = body.get("response_format", {}).get("json_schema", {}).get("schema")
    key = json.dumps([body["messages"], body.get("temperature"), seed, schema], sort_keys=True)
    rng = random.Random(hashlib.sha256(key.encode()).digest())
    if schema is not None:
        return json.dumps(_agreeing(fitting(schema, rng)))
    return " ".join(_word(rng) for _ in range(rng.randint(4, 8)))


def _agreeing(answer: Any) -> Any:
    """Make a verdict's reason fit its decision."""
    if isinstance(answer, dict) and "reason_code" in answer:
        if answer.get("pass") is not None and answer["pass"] != (answer["reason_code"] == "ok"):
            answer["reason_code"] = "ok" if answer["pass"] else "meaning"
        if "score" in answer:
            answer["reason_code"] = "partial"
    return answer


def fitting(schema: dict[str, Any], rng: random.Random) -> Any:
    """Return a value that the (simple) JSON schema allows."""
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "anyOf" in schema:
        return fitting(schema["anyOf"][0], rng)
    low, high = schema.get("minimum", 0), schema.get("maximum", 1)
    kind = schema.get("type", "object")
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "integer":
        return rng.randint(low, max(low, high))
    if kind == "number":
        return round(rng.uniform(low, high), 3)
    if kind == "string":
        return _word(rng)[: schema.get("maxLength", 100)].ljust(schema.get("minLength", 0), "x")
    if kind == "array":
        return [fitting(schema.get("items", {"type": "string"}), rng)] * schema.get("minItems", 1)
    if kind == "null":
        return None
    return {name: fitting(part, rng) for name, part in schema.get("properties", {}).items()}


def _word(rng: random.Random) -> str:
    return "".join(rng.choice("bdfgklmnprst") + rng.choice("aeiou") for _ in range(3))


class FakeOpenAI:
    """A fake server, described in the module's docstring. `app` is ASGI; `running()` serves it."""

    def __init__(
        self,
        model: str = "teacher",
        *,
        api_key: str | None = None,
        respond: Callable[[Body, int | None], str | None] = made_up,
        records: bool = True,
    ) -> None:
        self.model = model
        self.api_key = api_key
        self.respond = respond
        self._records = records
        self.forget()
        self.well()
        self.app = FastAPI()
        self.app.get("/v1/models")(self._models)
        self.app.post("/v1/chat/completions")(self._chat)
        self.app.post("/v1/responses")(self._responses)

    def well(self) -> None:
        """Stop misbehaving."""
        self.refuse_n: bool | str = "greedy"
        self.most_choices: int | None = None
        self.numbered = True
        self.hang: bool | Callable[[Body], bool] = False
        self.cut = False
        self.finish_reason: str | Callable[[Body, int | None], str | None] | None = "stop"
        self.also: dict[str, Any] = {}
        self.counts_tokens = True
        self.raw: str | None = None
        self.no_template = False
        self.context_length: int | None = None
        self._failures: list[_Failure] = []

    def forget(self) -> None:
        """Clear what was recorded. Only while nothing is in flight."""
        self.requests: list[Recorded] = []
        self.in_flight = self.sequences_in_flight = 0
        self.peak_requests = self.peak_sequences = 0

    def fail(
        self,
        status: int | str,
        times: int | None = 1,
        message: str = "told to fail",
        headers: dict[str, str] | None = None,
        only: Callable[[Body], bool] = lambda body: True,
    ) -> None:
        """Make the next requests fail, as the module's docstring says.

        only: which requests fail. Others are answered in the meantime.
        """
        self._failures.append(_Failure(status, times, message, headers or {}, only))

    @property
    def choices_served(self) -> int:
        """Return the number of choices of all answers."""
        return sum(request.choices for request in self.requests)

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Serve until the block ends, and yield the base URL for an SDK."""
        with running_app(self.app) as url:
            try:
                yield f"{url}/v1"
            finally:
                self.hang = False  # or the server waits for its requests

    # -- routes -----------------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        if not self._key_fits(request):
            return JSONResponse({"error": "Unauthorized"}, 401)
        description: Body = {"id": self.model, "object": "model"}
        if self.context_length is not None:
            description["max_model_len"] = self.context_length
        return JSONResponse({"object": "list", "data": [description]})

    async def _responses(self, request: Request) -> Response:
        """Answer the Responses API: what `respond` returns for the same chat, in that API's
        format.
        """
        body = await request.json()
        answer = await self._answered(request, body | {"messages": body["input"]})
        if answer.status_code != 200:
            return answer
        try:
            completion = json.loads(bytes(answer.body))
            (choice,) = completion["choices"]
        except ValueError:
            return answer
        text, usage = choice["message"]["content"], completion["usage"]
        is_complete = choice["finish_reason"] != "length"
        used = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
        message = {"type": "message", "role": "assistant", "status": "completed"}
        return JSONResponse(
            {
                "object": "response",
                "model": self.model,
                "status": "completed" if is_complete else "incomplete",
                "incomplete_details": None if is_complete else {"reason": "max_output_tokens"},
                "output": [
                    {"type": "reasoning", "summary": []},
                    message | {"content": [{"type": "output_text", "text": text or ""}]},
                ],
                "usage": used | {"total_tokens": usage["total_tokens"]},
            }
        )

    async def _chat(self, request: Request) -> Response:
        return await self._answered(request, await request.json())

    async def _answered(self, request: Request, body: Body) -> Response:
        record = Recorded(body, dict(request.headers), time.time())
        if self._records:
            self.requests.append(record)
        n = body.get("n") or 1
        self.in_flight += 1
        self.sequences_in_flight += n
        self.peak_requests = max(self.peak_requests, self.in_flight)
        self.peak_sequences = max(self.peak_sequences, self.sequences_in_flight)
        try:
            while self._hangs(body) and not await request.is_disconnected():
                await asyncio.sleep(0.005)
            response = (
                self._refusal(request, body) or self._failed(body) or self._answer(body, record)
            )
            if self.raw is not None and response.status_code == 200:
                response = Response(self.raw, media_type="application/json")
        finally:
            self.in_flight -= 1
            self.sequences_in_flight -= n
        record.status = response.status_code
        return response

    def _hangs(self, body: Body) -> bool:
        return self.hang(body) if callable(self.hang) else self.hang

    def _key_fits(self, request: Request) -> bool:
        return self.api_key in (None, request.headers.get("authorization", "")[len("Bearer ") :])

    def _refusal(self, request: Request, body: Body) -> Response | None:
        """Return the error for an invalid request, in vLLM's order and words."""
        n, greedy = body.get("n") or 1, body.get("temperature") == 0
        if not self._key_fits(request):
            return JSONResponse({"error": "Unauthorized"}, 401)
        if body.get("model") != self.model:
            return _error(404, f"The model `{body.get('model')}` does not exist.")
        if self.no_template:
            return _error(400, NO_TEMPLATE)
        max_tokens, prompt = _max_tokens(body) or 0, _prompt_words(body)
        if self.context_length is not None and prompt + max_tokens > self.context_length:
            limit_text = (
                f"This model's maximum context length is {self.context_length} tokens. However,"
            )
            return _error(400, f"{limit_text} you requested {prompt + max_tokens} tokens.")
        if n > 1 and (self.refuse_n is True or (self.refuse_n == "greedy" and greedy)):
            return _error(400, "n must be 1 when using greedy sampling." if greedy else "n > 1")
        return None

    def _failed(self, body: Body) -> Response | None:
        if not self._failures or not self._failures[0].only(body):
            return None
        failure = self._failures[0]
        if failure.times is not None:
            failure.times -= 1
            if failure.times <= 0:
                self._failures.pop(0)
        if failure.status == "close":  # uvicorn closes the connection of an answer that is short
            return _BrokenOff(b"{", headers={"content-length": "9999"})
        if failure.status == "not_json":
            return Response(b'{"choices": [{"ind', media_type="application/json")
        if failure.status == "no_choices":
            return JSONResponse({"choices": []})
        assert isinstance(failure.status, int)
        return _error(failure.status, failure.message, failure.headers)

    def _answer(self, body: Body, record: Recorded) -> Response:
        n, greedy = body.get("n") or 1, body.get("temperature") == 0
        choices, tokens = [], 0
        for i in range(min(n, self.most_choices or n)):
            seed = None if greedy else (body.get("seed") or 0) + i
            text = self.respond(body, seed)
            words, reason = (text or "").split(" "), self.finish_reason
            if callable(reason):
                reason = reason(body, seed)
            max_words = len(words) // 2 if self.cut else _max_tokens(body) or len(words)
            if len(words) > max_words:
                text, words, reason = " ".join(words[:max_words]), words[:max_words], "length"
            elif self.cut and text is not None:
                text, reason = text[: len(text) // 2], "length"
            tokens += len(words)
            message = {"role": "assistant", "content": text} | self.also
            index = i if self.numbered else 0
            choices.append({"index": index, "message": message, "finish_reason": reason})
        record.choices = len(choices)
        prompt = _prompt_words(body)
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens}
        usage["total_tokens"] = prompt + tokens
        head = {"id": f"chatcmpl-{record.id}", "object": "chat.completion", "created": 0}
        counted = {"usage": usage} if self.counts_tokens else {}
        return JSONResponse(head | {"model": self.model, "choices": choices} | counted)


class _BrokenOff(Response):
    """A response that sends less than its content-length says."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        await send({"type": "http.response.body", "body": b"{", "more_body": True})


def _max_tokens(body: Body) -> int | None:
    """Return the token limit of a request, by any of the names that the API has for it."""
    names = ("max_tokens", "max_completion_tokens", "max_output_tokens")
    return next((body[name] for name in names if body.get(name)), None)


def _prompt_words(body: Body) -> int:
    return sum(len(str(message["content"]).split()) for message in body["messages"])


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    error = {"message": message, "type": "Error", "param": None, "code": status}
    return JSONResponse({"error": error}, status, headers)
