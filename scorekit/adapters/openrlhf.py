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
import math
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import BaseModel, FailFast

from scorekit.adapters.http import create_routes, parse_body
from scorekit.adapters.shared import (
    RewardSettings,
    TrainerReward,
    TrainerRow,
    check_definition,
    component_columns,
    fields_of,
    message_text,
    reward_settings,
)
from scorekit.command import clean_exit, print_line, run_app
from scorekit.errors import UserError
from scorekit.net.addresses import is_loopback
from scorekit.rewards import load_definition, raise_for_missing
from scorekit.rewards.results import Range, reward_range
from scorekit.schemas import Overlong
from scorekit.text.end_marks import without_end_marks

if TYPE_CHECKING:
    from scorekit.server.bridge import BridgeMiddleware

Trainer = Literal["openrlhf", "slime"]
#: Seconds that each trainer waits for an answer, and those of our deadline by default.
WAITS_S: dict[str, float] = {"openrlhf": 180.0, "slime": 120.0}
DEADLINES_S: dict[str, float] = {"openrlhf": 170.0, "slime": 110.0}
#: Part of `--deadline` that a request of several samples may take; then each is requested alone.
SHARE_OF_DEADLINE = 0.7
#: `--reward.clip_range` of OpenRLHF 0.11.2 by default.
OPENRLHF_CLIP_RANGE = (-10.0, 10.0)


class RewardRequest(BaseModel):
    """A request of OpenRLHF; labels may be null."""

    # FailFast: an invalid body must not cost a list of all its errors.
    query: Annotated[list[str], FailFast()]
    prompts: Annotated[list[str], FailFast()]
    labels: list[Any] | None = None


class SlimeRequest(BaseModel):
    """A request of slime; the prompt may be chat messages, the label null."""

    prompt: str | list[dict[str, Any]]
    response: str
    label: Any = None


def completion_of(
    query: str,
    prompt: str,
    end_marks: Sequence[str] | None = None,
    turn_mark: str | None = None,
) -> str:
    """Return the completion: the query after its prompt, without the marks at its end.

    end_marks: see `without_end_marks`.
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


class RewardServer:
    """Answers the requests of OpenRLHF and slime with rewards.

    clip_range: of OpenRLHF, if rewards may be outside: then each answer to it says whether its
    reward is, and `metrics` counts them.
    """

    def __init__(
        self,
        reward: TrainerReward,
        end_marks: Sequence[str] | None = None,
        turn_mark: str | None = None,
        clip_range: tuple[float, float] | None = None,
    ) -> None:
        self._reward = reward
        self._end_marks = end_marks
        self._turn_mark = turn_mark
        self._clip_range = clip_range
        self._num_rewards = self._num_outside = 0

    async def get_reward(self, body: bytes) -> dict[str, Any]:
        """Return the answer to OpenRLHF.

        Raises UserError if the request has another form, SampleError if a sample failed, and the
        client's errors."""
        rewards, logs = await self._score(self._parse_rows(body))
        if self._clip_range is not None:
            low, high = self._clip_range
            is_outside = [float(not low <= reward <= high) for reward in rewards]
            logs = logs | {"outside_clip_range": is_outside}
            self._num_rewards += len(rewards)
            self._num_outside += int(sum(is_outside))
        return {"rewards": rewards, "scores": rewards, "extra_logs": logs}

    def metrics(self) -> str:
        """Return the counters for Prometheus."""
        counters = {
            "scorekit_clip_checked_rewards_total": self._num_rewards,
            "scorekit_outside_clip_range_total": self._num_outside,
        }
        lines = [f"# TYPE {name} counter\n{name} {value}\n" for name, value in counters.items()]
        return "".join(lines)

    async def remote_rm(self, body: bytes) -> float:
        """Return the answer to slime, which uses it unchanged. Raises as `get_reward`."""
        request = parse_body(SlimeRequest, body)
        text = without_end_marks(request.response, self._end_marks)
        row = TrainerRow(fields_of(request.label), message_text(request.prompt), text)
        (reward,), _ = await self._score([row])
        return reward

    async def _score(self, rows: list[TrainerRow]) -> tuple[list[float], dict[str, list[float]]]:
        """Return the rewards, and the numbers for OpenRLHF's log by name.

        OpenRLHF 0.11.2 ends a run if samples have different names in it, or None. So each sample
        has all names of a definition, and NaN where it has no value.
        """
        results = await self._reward.score(rows)
        rewards = raise_for_missing(results)
        columns = component_columns(results)
        if self._reward.settings.definition is None:  # the score of its one service
            columns = {
                f"{name.removeprefix('component/')}_score": values
                for name, values in columns.items()
            }
        return rewards, {
            name: [math.nan if value is None else value for value in values]
            for name, values in columns.items()
        }

    def _parse_rows(self, body: bytes) -> list[TrainerRow]:
        request = parse_body(RewardRequest, body)
        labels = request.labels or [None] * len(request.query)
        if not len(request.query) == len(request.prompts) == len(labels):
            raise UserError("query, prompts and labels have different lengths")
        rows = []
        for index, (query, prompt) in enumerate(zip(request.query, request.prompts, strict=True)):
            try:
                text = completion_of(query, prompt, self._end_marks, self._turn_mark)
            except UserError as error:
                raise UserError(f"sample {index}: {error}") from None
            rows.append(TrainerRow(fields_of(labels[index]), prompt, text))
        return rows


def create_app(
    server: RewardServer, host: str = "127.0.0.1", allow_host: str = ""
) -> BridgeMiddleware:
    """Return the ASGI application: POST /get_reward and /remote_rm, GET /health and /metrics.

    host: the address that it listens on.
    allow_host: further names of it, separated by commas.
    Raises UserError for a name that is none.
    """
    from scorekit.server.bridge import bridge_access

    return create_routes(
        posts={"/get_reward": server.get_reward, "/remote_rm": server.remote_rm},
        gets={"/health": lambda: {"live": True}, "/metrics": server.metrics},
        access=bridge_access(host, allow_host),
    )


def check_deadline(seconds: float, trainer: Trainer, key: str) -> None:
    """Raise UserError unless the deadline ends before the trainer's.

    key: what sets it.
    """
    if seconds >= WAITS_S[trainer]:
        raise UserError(
            f"{key}: {seconds:g} s, but {trainer} waits {WAITS_S[trainer]:g} s for an answer. Set "
            f"{DEADLINES_S[trainer]:g}"
        )


@dataclass(frozen=True, slots=True)
class ClipCheck:
    """Holds what is certain about rewards and a clip range.

    warning: a line for the user, or None.
    must_count: some rewards may be outside.
    """

    warning: str | None
    must_count: bool


def check_clip_range(
    rewards: tuple[float, float], clip_range: tuple[float, float], *, is_given: bool
) -> ClipCheck:
    """Compare the rewards that are possible with OpenRLHF's clip range.

    rewards: least and greatest; infinite where it is not known.
    is_given: the user has named the range.
    Raises UserError if a reward that is known to be possible would be clipped.
    """
    (low, high), (clip_low, clip_high) = rewards, clip_range
    option = f"--clip-range {clip_low:g} {clip_high:g}"
    if not clip_low < clip_high:  # also where one is NaN, outside of which nothing is
        raise UserError(f"{option}: the first number must be less than the second")
    bounds = f"{_number(low)} to {_number(high)}"
    if (math.isfinite(low) and low < clip_low) or (math.isfinite(high) and high > clip_high):
        label = option if is_given else f"{option} (OpenRLHF's default)"
        needed_low = min(low, clip_low) if math.isfinite(low) else clip_low
        needed_high = max(high, clip_high) if math.isfinite(high) else clip_high
        needed = f"{needed_low:g} {needed_high:g}"
        raise UserError(
            f"{label}: rewards are {bounds}, and OpenRLHF would clip them. Start it with "
            f"--reward.clip_range {needed}, and this with --clip-range {needed}"
        )
    if not (math.isfinite(low) and math.isfinite(high)):
        return ClipCheck(
            f"rewards are {bounds}: OpenRLHF clips those outside {clip_low:g} to {clip_high:g}. "
            "`outside_clip_range` in its log and in GET /metrics counts them",
            must_count=True,
        )
    width = high - low
    if width > min(-clip_low, clip_high):
        return ClipCheck(
            f"rewards are {bounds}: if OpenRLHF subtracts a baseline, they are {-width:g} to "
            f"{width:g} before it clips. Then set --reward.clip_range {-width:g} {width:g}",
            must_count=False,
        )
    return ClipCheck(None, must_count=False)


def _number(value: float) -> str:
    return f"{value:g}" if math.isfinite(value) else "an unknown number"


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
    Literal["metricx", "xcomet", "judge", "reward_model"] | None,
    typer.Option(help="What must run there."),
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
    """Return the settings of the reward's source.

    of_url: options that `--definition` replaces.
    """
    if bool(url) == (definition is not None):
        raise UserError("--url and --definition: give one of them")
    values = {name: value for name, value in of_url.items() if value is not None}
    if definition is not None:
        for name in values:
            raise UserError(f"--{name}: has no effect beside --definition. Set it in the file")
        checked = load_definition(definition)
        check_definition(checked, "the trainer", ())
        return {"definition": checked}
    values.pop("service", None)
    deadline = values.pop("deadline", DEADLINES_S[trainer])
    timeout_s = SHARE_OF_DEADLINE * deadline
    return {**values, "timeout_s": timeout_s, "deadline_s": deadline, "url": url}


async def _serve(
    address: _Address, settings: RewardSettings, start: _Start, marks: Mapping[str, Any]
) -> None:
    from scorekit.server.bridge import serve_bridge

    async with AsyncExitStack() as stack:
        reward, label, rewards = await _open(stack, settings, start)
        clip_range = None
        if start.trainer == "openrlhf":
            clip_range = _counted_clip_range(rewards, start.clip_range)
        server = RewardServer(reward, **marks, clip_range=clip_range)
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


async def _open(
    stack: AsyncExitStack, settings: RewardSettings, start: _Start
) -> tuple[TrainerReward, str, Range]:
    """Return the source of rewards once it is ready, what scores, and its range of rewards."""
    reward = TrainerReward(settings, "the trainer")
    stack.push_async_callback(reward.close)
    infos = await reward.check(start.wait_s)
    definition = (await reward.composite()).definition
    if settings.definition is not None:
        return reward, ", ".join(definition.components), reward_range(definition, infos)
    (info,) = infos.values()
    if start.service is not None and info.service != start.service:
        raise UserError(f"--service {start.service}: {settings.url[0]} is a {info.service} service")
    return reward, info.model, reward_range(definition, infos)


if __name__ == "__main__":
    run_app(app, prog_name="python -m scorekit.adapters.openrlhf")
