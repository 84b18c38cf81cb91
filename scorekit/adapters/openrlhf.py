"""Remote reward models of OpenRLHF (POST /get_reward) and slime (POST /remote_rm).

python -m scorekit.adapters.openrlhf --url http://127.0.0.1:8001 --port 5000
python -m scorekit.adapters.openrlhf --definition reward.yaml --port 5000
... --reward.remote_url http://127.0.0.1:5000/get_reward --data.label_key src  (of OpenRLHF)
... --rm-type remote_rm --rm-url http://127.0.0.1:5000/remote_rm               (of slime)

OpenRLHF sends {"query": prompt + completion with special tokens, "prompts", "labels"}. slime sends
{"prompt", "response", "label"} for one sample and expects the number alone. A label may be a plain
text (its field is called `label`) or a JSON object with fields. Any failure fails the request with
a 5xx: both trainers retry, and then their runs end.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import ValidationError
from pydantic_core import to_json

from scorekit.adapters.composite import check_single_samples, component_columns, definition_of
from scorekit.adapters.remote_requests import (
    END_MARKS,
    RewardRequest,
    SlimeRequest,
    completion_of,
    fields_of,
    without_end_marks,
)
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
from scorekit.rewards import CompositeReward, load_definition, raise_for_missing
from scorekit.schemas import Overlong
from scorekit.scorers import raise_for_failures


class RewardServer:
    """Answers the requests of OpenRLHF and slime with scores of a service, or composite rewards.

    client: a CompositeReward if the settings have a definition.
    """

    def __init__(
        self,
        client: ScoringClient | CompositeReward,
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
        rewards, logs = await self._score(self._parse_samples(body))
        return {"rewards": rewards, "scores": rewards, "extra_logs": logs}

    async def remote_rm(self, body: bytes) -> float:
        """Return the answer to slime, which uses it unchanged. Raises the errors of
        `get_reward`."""
        try:
            request = SlimeRequest.model_validate_json(body)
        except ValidationError as error:
            raise UserError(describe_validation_error(error, "body")) from None
        mt = without_end_marks(request.response, self._end_marks)
        sample = self._samples.sample(fields_of(request.label), message_text(request.prompt), mt)
        (reward,), _ = await self._score([sample])
        return reward

    async def _score(
        self, samples: list[dict[str, Any]]
    ) -> tuple[list[float], dict[str, list[float]]]:
        """Return the rewards, and the numbers for OpenRLHF's log by name.

        OpenRLHF 0.11.2 ends a run if samples have different names in it, or None. So each sample
        has all names of a definition, and NaN where it has no value.
        """
        if isinstance(self._client, CompositeReward):
            composite_results = await self._client.score(samples)
            rewards = raise_for_missing(composite_results)
            columns = component_columns(composite_results)
            return rewards, {
                name: [math.nan if value is None else value for value in values]
                for name, values in columns.items()
            }
        info = await self._client.limits()
        results = await self._client.score(samples, options_for(info, self._settings))
        scored = raise_for_failures(results)
        logs = {f"{info.service}_score": [result.score for result in scored]}
        return [reward_of(result, info, self._settings) for result in scored], logs

    def _parse_samples(self, body: bytes) -> list[dict[str, Any]]:
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
Cut = Annotated[
    Overlong | None,
    typer.Option(
        help="Inputs over the limit: cut, failed, or in windows.", show_default="truncate"
    ),
]
Deadline = Annotated[
    float | None,
    typer.Option(
        min=1,
        help="Seconds for an answer; OpenRLHF waits 180, slime 120.",
        show_default="170.0",
    ),
]
Offset = Annotated[
    float | None, typer.Option(help="MetricX: reward = offset - score.", show_default="5.0")
]
Urls = Annotated[list[str] | None, typer.Option(help="URL of the service; repeat it for replicas.")]
Definition = Annotated[Path | None, typer.Option(help="Or: a YAML file with a composite reward.")]


@app.command()
def serve(
    url: Urls = None,
    definition: Definition = None,
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
    offset: Offset = None,
    overlong: Cut = None,
    deadline: Deadline = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the services at first.")] = 600.0,
) -> None:
    """Serve rewards to OpenRLHF and slime."""
    with clean_exit():
        if not no_auth and not is_loopback(host):
            raise UserError(f"--host {host} can be reached by others: say --no-auth if you mean it")
        of_url = {"service": service, "task": task, "offset": offset}
        of_url |= {"overlong": overlong, "deadline": deadline}
        settings = reward_settings(
            **_source(url, definition, of_url),
            src_key=src_key,
            src_pattern=src_pattern,
            src_template=src_template,
            ref_key=ref_key,
            src_lang=src_lang,
            tgt_lang=tgt_lang,
            src_lang_key=src_lang_key,
            tgt_lang_key=tgt_lang_key,
            postprocess=postprocess,
        )
        marks = (tuple(end_mark or END_MARKS), turn_mark)
        asyncio.run(_serve(host, port, settings, service, marks, wait))


def _source(
    url: list[str] | None, definition: Path | None, of_url: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of the reward's source. of_url: options that `--definition` replaces."""
    if bool(url) == (definition is not None):
        raise UserError("--url and --definition: give one of them")
    values = {name: value for name, value in of_url.items() if value is not None}
    if definition is not None:
        for name in values:
            raise UserError(f"--{name}: has no effect beside --definition. Set it in the file")
        checked = load_definition(definition)
        check_single_samples(checked, "the trainer")
        return {"definition": checked}
    values.pop("service", None)
    if "deadline" in values:
        deadline = values.pop("deadline")
        values |= {"timeout_s": deadline, "deadline_s": deadline}
    return {"timeout_s": 170.0, **values, "url": url}


async def _serve(
    host: str,
    port: int,
    settings: RewardSettings,
    service: str | None,
    marks: tuple[Sequence[str], str | None],
    wait: float,
) -> None:
    import uvicorn

    opened: AbstractAsyncContextManager[tuple[ScoringClient | CompositeReward, str]]
    if settings.definition is not None:
        opened = _open_composite(settings, wait)
    else:
        opened = _open_service(settings, service, wait)
    async with opened as (client, label):
        app = create_app(RewardServer(client, settings, *marks))
        server = uvicorn.Server(uvicorn.Config(app, host=host, port=port, log_level="warning"))
        typer.echo(f"rewards of {label}: http://{host}:{port}/get_reward, /remote_rm", err=True)
        await server.serve()


@asynccontextmanager
async def _open_service(
    settings: RewardSettings, service: str | None, wait: float
) -> AsyncIterator[tuple[ScoringClient | CompositeReward, str]]:
    """Yield the client of a service that fits the settings, and the name of its model."""
    async with ScoringClient(
        settings.url,
        timeout_s=settings.timeout_s,
        deadline_s=settings.deadline_s,
        max_in_flight=MAX_IN_FLIGHT,
    ) as client:
        await client.wait_ready(wait)
        info = await client.info()
        if service is not None and info.service != service:
            raise UserError(f"--service {service}: {settings.url[0]} is a {info.service} service")
        options_for(info, settings)
        yield client, info.model


@asynccontextmanager
async def _open_composite(
    settings: RewardSettings, wait: float
) -> AsyncIterator[tuple[ScoringClient | CompositeReward, str]]:
    """Yield the composite reward, whose services fit its definition, and its components."""
    async with CompositeReward(definition_of(settings)) as reward:
        await reward.check(wait_s=wait)
        yield reward, ", ".join(reward.definition.components)


if __name__ == "__main__":
    app(prog_name="python -m scorekit.adapters.openrlhf")
