"""Remote reward models of OpenRLHF (POST /get_reward) and slime (POST /remote_rm).

scorekit adapter openrlhf --url http://127.0.0.1:8001 --port 5000 --clip-range -25 25
scorekit adapter openrlhf --definition reward.yaml --port 5000
... --reward.remote_url http://127.0.0.1:5000/get_reward --data.label_key src  (of OpenRLHF)
... --trainer slime; --rm-type remote_rm --rm-url http://127.0.0.1:5000/remote_rm  (of slime)

OpenRLHF sends {"query": prompt + completion with special tokens, "prompts", "labels"}. slime sends
{"prompt", "response", "label"} for one sample and expects the number alone. A label may be a plain
text (its field is called `label`) or a JSON object with fields. Any failure fails the request with
a 5xx: both trainers retry, and then their runs end. Within slime's own process failures cost less:
scorekit.adapters.slime.
"""

from __future__ import annotations

from scorekit.interrupts import end_at_once

if __name__ == "__main__":
    end_at_once()  # at Ctrl-C during the imports below

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from scorekit.adapters.composite import check_single_samples, definition_of_service
from scorekit.adapters.reward_server import RewardServer, create_app
from scorekit.adapters.rewards import RewardSettings, reward_settings
from scorekit.adapters.trainer_limits import (
    DEADLINES_S,
    OPENRLHF_CLIP_RANGE,
    Trainer,
    check_clip_range,
    check_deadline,
)
from scorekit.client.asynchronous import ScoringClient
from scorekit.command import clean_exit, print_line, run_app
from scorekit.errors import UserError
from scorekit.net.hosts import is_loopback
from scorekit.rewards import CompositeReward, load_definition
from scorekit.rewards.results import Range, reward_range
from scorekit.schemas import Overlong

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


NoAuth = Annotated[
    bool,
    typer.Option(
        "--no-auth",
        help="Allow an address that others can reach: the trainers send no key, so anyone there "
        "can ask for rewards.",
    ),
]
AllowHost = Annotated[
    str,
    typer.Option(
        help="Further names of this server, separated by commas: where the trainer calls it by a "
        "host name. It answers to loopback names, addresses and these alone."
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
    list[str] | None, typer.Option(help="What ends a turn; default: the marks of common models.")
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
        show_default="170, of slime 110",
    ),
]
Offset = Annotated[
    float | None, typer.Option(help="MetricX: reward = offset - score.", show_default="5.0")
]
TrainerName = Annotated[Trainer, typer.Option(help="Whose requests are answered.")]
ClipRange = Annotated[
    tuple[float, float] | None,
    typer.Option(
        help="OpenRLHF's --reward.clip_range, where you set it. Rewards that it would clip are "
        "refused.",
        show_default="-10 10",
    ),
]
Urls = Annotated[list[str] | None, typer.Option(help="URL of the service; repeat it for replicas.")]
Definition = Annotated[Path | None, typer.Option(help="Or: a YAML file with a composite reward.")]


@app.command()
def serve(
    url: Urls = None,
    definition: Definition = None,
    service: Service = None,
    trainer: TrainerName = "openrlhf",
    clip_range: ClipRange = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 5000,
    no_auth: NoAuth = False,
    allow_host: AllowHost = "",
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
    with clean_exit(stdout="log"):
        if not no_auth and not is_loopback(host):
            raise UserError(f"--host {host} can be reached by others: say --no-auth if you mean it")
        address = _Address(host, port, allow_host)
        address.check()
        of_url = {"service": service, "task": task, "offset": offset}
        of_url |= {"overlong": overlong, "deadline": deadline}
        settings = reward_settings(
            **_source(url, definition, of_url, trainer),
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
        if settings.definition is not None:
            check_deadline(settings.definition.deadline_s, trainer, f"{definition}: deadline_s")
        else:
            check_deadline(settings.deadline_s, trainer, "--deadline")
        if trainer == "slime" and clip_range is not None:
            raise UserError("--clip-range: has no effect with --trainer slime, which clips nothing")
        marks = {"end_marks": tuple(end_mark) if end_mark else None, "turn_mark": turn_mark}
        asyncio.run(_serve(address, settings, _Start(service, trainer, clip_range, wait), marks))


@dataclass(frozen=True, slots=True)
class _Address:
    """Holds where to listen, and the further names under which the trainer calls."""

    host: str
    port: int
    allow_host: str

    def check(self) -> None:
        """Raise UserError for a name that is none."""
        from scorekit.server.bridge import bridge_access

        bridge_access(self.host, self.allow_host)


@dataclass(frozen=True, slots=True)
class _Start:
    """Settings that are checked before the first request."""

    service: str | None
    trainer: Trainer
    clip_range: tuple[float, float] | None
    wait_s: float


def _source(
    url: list[str] | None, definition: Path | None, of_url: Mapping[str, Any], trainer: Trainer
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
    deadline = values.pop("deadline", DEADLINES_S[trainer])
    return {**values, "timeout_s": deadline, "deadline_s": deadline, "url": url}


async def _serve(
    address: _Address, settings: RewardSettings, start: _Start, marks: Mapping[str, Any]
) -> None:
    from scorekit.server.bridge import serve_bridge

    async with AsyncExitStack() as stack:
        client, label, rewards = await _opened(stack, settings, start)
        clip_range = None
        if start.trainer == "openrlhf":
            clip_range = _counted_clip_range(rewards, start.clip_range)
        server = RewardServer(client, settings, **marks, clip_range=clip_range)
        app = create_app(server, address.host, address.allow_host)
        path = "get_reward" if start.trainer == "openrlhf" else "remote_rm"
        announce = f"rewards of {label}: "
        await serve_bridge(app, address.host, address.port, lambda url: f"{announce}{url}/{path}")


def _counted_clip_range(
    rewards: Range, clip_range: tuple[float, float] | None
) -> tuple[float, float] | None:
    """Return the clip range if some rewards may be outside. See `check_clip_range`."""
    checked_range = clip_range or OPENRLHF_CLIP_RANGE
    check = check_clip_range(rewards, checked_range, is_given=clip_range is not None)
    if check.warning is not None:
        print_line(f"warning: {check.warning}")
    return checked_range if check.must_count else None


async def _opened(
    stack: AsyncExitStack, settings: RewardSettings, start: _Start
) -> tuple[ScoringClient | CompositeReward, str, Range]:
    """Return a source of rewards that fits the settings, what scores, and its range of rewards."""
    if settings.definition is not None:
        reward = await stack.enter_async_context(CompositeReward(settings.definition))
        infos = await reward.check(wait_s=start.wait_s)
        label = ", ".join(settings.definition.components)
        return reward, label, reward_range(settings.definition, infos)
    client = await stack.enter_async_context(ScoringClient(settings.url, **settings.client_options))
    await client.wait_ready(start.wait_s)
    info = await client.limits()
    if start.service is not None and info.service != start.service:
        raise UserError(f"--service {start.service}: {settings.url[0]} is a {info.service} service")
    definition = definition_of_service(settings, info)
    infos = dict.fromkeys(definition.components, info)
    return client, info.model, reward_range(definition, infos)


if __name__ == "__main__":
    run_app(app, prog_name="python -m scorekit.adapters.openrlhf")
