"""Remote reward models of OpenRLHF (POST /get_reward) and slime (POST /remote_rm).

python -m scorekit.adapters.openrlhf --url http://127.0.0.1:8001 --port 5000
... --remote_rm_url http://127.0.0.1:5000/get_reward --label_key src       (of OpenRLHF's trainer)
... --rm-type remote_rm --rm-url http://127.0.0.1:5000/remote_rm           (of slime's)

OpenRLHF sends {"query": prompt + completion with special tokens, "prompts", "labels"}. slime sends
{"prompt", "response", "label"} for one sample and expects the number alone. A label may be a plain
text (its field is called `label`) or a JSON object with fields. Any failure fails the request with
a 5xx: both trainers retry; then OpenRLHF continues without a reward for the sample, and slime ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal

import typer
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json, to_json

from scorekit.adapters.rewards import (
    MAX_IN_FLIGHT,
    RewardSettings,
    Samples,
    message_text,
    options_for,
    reward_of,
    reward_settings,
)
from scorekit.client.asynchronous import ScoringClient
from scorekit.command import clean_exit
from scorekit.config import describe_validation_error
from scorekit.errors import ScorekitError, UserError
from scorekit.net.hosts import is_loopback
from scorekit.schemas import Info, JudgeScored, Overlong, Scored
from scorekit.scorers import raise_for_failures

#: Tokens that models put at the end of a turn; they are not part of the translation.
END_MARKS = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<eos>", "</s>", "<pad>")


class RewardRequest(BaseModel):
    """A request of OpenRLHF; labels may be null."""

    query: list[str]
    prompts: list[str]
    labels: list[Any] | None = None


class SlimeRequest(BaseModel):
    """A request of slime; the prompt may be chat messages, the label null."""

    prompt: str | list[dict[str, Any]]
    response: str
    label: Any = None


def without_end_marks(text: str, end_marks: Sequence[str]) -> str:
    """Return the text without the marks at its end and the white space around them."""
    while True:
        bare = text.rstrip()
        mark = next((mark for mark in end_marks if mark and bare.endswith(mark)), None)
        if mark is None:
            return text
        text = bare.removesuffix(mark)


def completion_of(
    query: str, prompt: str, end_marks: Sequence[str] = END_MARKS, turn_mark: str | None = None
) -> str:
    """Return the completion: the query after its prompt, without the marks at its end.

    turn_mark: the text that begins the model's turn. If it is set, the query need not contain the
    prompt unchanged: the completion begins after as many of these marks as the prompt has.

    Raises UserError if the start of the completion cannot be found.
    """
    if turn_mark is not None:
        turns = prompt.count(turn_mark)
        segments = query.split(turn_mark, turns)
        if not turns or len(segments) <= turns:
            raise UserError(f"{turn_mark!r} does not stand in prompt and query")
        text = segments[-1]
    elif prompt in query:
        text = query[query.index(prompt) + len(prompt) :]
    else:
        raise UserError(
            "the prompt does not stand in the query letter by letter (cut, or changed by the "
            "tokenizer): say --turn-mark"
        )
    return without_end_marks(text, end_marks)


def fields_of(label: Any) -> dict[str, Any]:
    """Return the fields of a label: those of its JSON object, and the full label as `label`."""
    fields: dict[str, Any] = {}
    if isinstance(label, str) and label.lstrip().startswith("{"):
        try:
            fields = from_json(label)
        except ValueError:
            fields = {}
    elif isinstance(label, dict):
        fields = label
    return {**fields, "label": label}


class RewardServer:
    """Answers the requests of OpenRLHF and slime with scores of a scoring service."""

    def __init__(
        self,
        client: ScoringClient,
        settings: RewardSettings,
        end_marks: Sequence[str] = END_MARKS,
        turn_mark: str | None = None,
    ) -> None:
        self._client = client
        self._settings = settings
        self._samples = Samples(settings)
        self._end_marks = end_marks
        self._turn_mark = turn_mark

    async def get_reward(self, body: bytes) -> dict[str, Any]:
        """Return the answer to OpenRLHF.

        Raises UserError if the request has another form, SampleError if a sample failed, and the
        client's errors."""
        results, info = await self._score(self._parse_samples(body))
        rewards = [reward_of(result, info, self._settings) for result in results]
        scores = {f"{info.service}_score": [result.score for result in results]}
        return {"rewards": rewards, "scores": rewards, "extra_logs": scores}

    async def remote_rm(self, body: bytes) -> float:
        """Return the answer to slime, which uses it unchanged. Raises the errors of
        `get_reward`."""
        try:
            request = SlimeRequest.model_validate_json(body)
        except ValidationError as error:
            raise UserError(describe_validation_error(error, "body")) from None
        mt = without_end_marks(request.response, self._end_marks)
        sample = self._samples.sample(fields_of(request.label), message_text(request.prompt), mt)
        (result,), info = await self._score([sample])
        return reward_of(result, info, self._settings)

    async def _score(
        self, samples: list[dict[str, str]]
    ) -> tuple[list[Scored | JudgeScored], Info]:
        info = await self._client.limits()
        results = await self._client.score(samples, options_for(info, self._settings))
        return raise_for_failures(results), info

    def _parse_samples(self, body: bytes) -> list[dict[str, str]]:
        try:
            request = RewardRequest.model_validate_json(body)
        except ValidationError as error:
            raise UserError(describe_validation_error(error, "body")) from None
        labels = request.labels or [None] * len(request.query)
        if not len(request.query) == len(request.prompts) == len(labels):
            raise UserError("query, prompts and labels have different lengths")
        samples = []
        for index, query in enumerate(request.query):
            prompt = request.prompts[index]
            try:
                mt = completion_of(query, prompt, self._end_marks, self._turn_mark)
                samples.append(self._samples.sample(fields_of(labels[index]), prompt, mt))
            except UserError as error:
                raise UserError(f"sample {index}: {error}") from None
        return samples


def create_app(server: RewardServer) -> Any:
    """Return the ASGI application: POST /get_reward, POST /remote_rm, GET /health."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    def answer(content: Any, status: int = 200) -> Response:
        return Response(to_json(content), status, media_type="application/json")

    def route(path: str, reward: Callable[[bytes], Awaitable[Any]]) -> Route:
        async def respond(request: Request) -> Response:
            try:
                return answer(await reward(await request.body()))
            except ScorekitError as error:
                status = 422 if isinstance(error, UserError) else 502
                kind = type(error).__name__
                return answer({"error": {"type": kind, "message": str(error)}}, status)

        return Route(path, respond, methods=["POST"])

    async def health(request: Request) -> Response:
        return answer({"live": True})

    application = Starlette(
        routes=[
            route("/get_reward", server.get_reward),
            route("/remote_rm", server.remote_rm),
            Route("/health", health),
        ]
    )
    # A redirect contains an address and a scheme. Behind a proxy the trainer cannot use them.
    application.router.redirect_slashes = False
    return application


app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


NoAuth = Annotated[
    bool,
    typer.Option(
        "--no-auth",
        help="Allow an address that others can reach: the trainers send no key, so anyone there "
        "can ask for rewards.",
    ),
]
TurnMark = Annotated[
    str | None,
    typer.Option(help="What begins the model's turn, where decoding changes the prompt."),
]
Postprocess = Annotated[
    str,
    typer.Option(
        help="Of a completion, before it is scored: strip (as the trainer), none, or "
        "module:function."
    ),
]


Service = Annotated[
    Literal["metricx", "xcomet", "judge"] | None, typer.Option(help="What must run there.")
]
SrcKey = Annotated[
    str, typer.Option(help="Field of the label that is the source; `label`: all of it.")
]
SrcPattern = Annotated[
    str | None, typer.Option(help="Or: a pattern with a group (?P<src>...) for the prompt.")
]
SrcTemplate = Annotated[
    str | None, typer.Option(help="Or: the template that the whole prompt was made from.")
]
Task = Annotated[
    str | None, typer.Option(help="Of a judge: the task that scores translations: mqm.")
]
OneLanguage = Annotated[str | None, typer.Option(help="Of a judge: the language of all samples.")]
LanguageKey = Annotated[
    str | None, typer.Option(help="Or: field of the label that is the language.")
]
EndMark = Annotated[
    list[str] | None, typer.Option(help="What ends a turn; default: the usual ones.")
]
Cut = Annotated[Overlong, typer.Option(help="Inputs over the limit: cut, failed, or in windows.")]
Deadline = Annotated[
    float, typer.Option(min=1, help="Seconds for an answer; OpenRLHF waits 180, slime 120.")
]


@app.command()
def serve(
    url: Annotated[list[str], typer.Option(help="URL of the service; repeat it for replicas.")],
    service: Service = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 5000,
    no_auth: NoAuth = False,
    src_key: SrcKey = "label",
    src_pattern: SrcPattern = None,
    src_template: SrcTemplate = None,
    ref_key: Annotated[
        str | None, typer.Option(help="Field of the label that is the reference.")
    ] = None,
    task: Task = None,
    src_lang: OneLanguage = None,
    tgt_lang: OneLanguage = None,
    src_lang_key: LanguageKey = None,
    tgt_lang_key: LanguageKey = None,
    end_mark: EndMark = None,
    turn_mark: TurnMark = None,
    postprocess: Postprocess = "strip",
    offset: Annotated[float, typer.Option(help="MetricX: reward = offset - score.")] = 5.0,
    overlong: Cut = "truncate",
    deadline: Deadline = 170.0,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the service at first.")] = 600.0,
) -> None:
    """Serve rewards to OpenRLHF and slime."""
    with clean_exit():
        if not no_auth and not is_loopback(host):
            raise UserError(f"--host {host} can be reached by others: say --no-auth if you mean it")
        settings = reward_settings(
            url=url,
            src_key=src_key,
            src_pattern=src_pattern,
            src_template=src_template,
            ref_key=ref_key,
            task=task,
            src_lang=src_lang,
            tgt_lang=tgt_lang,
            src_lang_key=src_lang_key,
            tgt_lang_key=tgt_lang_key,
            postprocess=postprocess,
            offset=offset,
            overlong=overlong,
            timeout_s=deadline,
            deadline_s=deadline,
        )
        marks = (tuple(end_mark or END_MARKS), turn_mark)
        asyncio.run(_serve(host, port, settings, service, marks, wait))


async def _serve(
    host: str,
    port: int,
    settings: RewardSettings,
    service: str | None,
    marks: tuple[Sequence[str], str | None],
    wait: float,
) -> None:
    import uvicorn

    async with ScoringClient(
        settings.url,
        timeout_s=settings.timeout_s,
        deadline_s=settings.deadline_s,
        max_in_flight=MAX_IN_FLIGHT,
    ) as client:
        app = create_app(RewardServer(client, settings, *marks))
        await client.wait_ready(wait)
        info = await client.info()
        if service is not None and info.service != service:
            raise UserError(f"--service {service}: {settings.url[0]} is a {info.service} service")
        options_for(info, settings)
        server = uvicorn.Server(uvicorn.Config(app, host=host, port=port, log_level="warning"))
        typer.echo(
            f"rewards of {info.model}: http://{host}:{port}/get_reward, /remote_rm", err=True
        )
        await server.serve()


if __name__ == "__main__":
    app(prog_name="python -m scorekit.adapters.openrlhf")
