"""Advantages for prime-rl: one for each sampled token, from the traces of our translation task.

    for trace, values in zip(traces, span_advantages(traces, tokenizer), strict=True):
        assign_advantages(trace, values)  # prime-rl's own

`docs/how-to/reward-tokens.md` says what prime-rl needs to call it. This module imports neither
prime-rl nor verifiers: a trace is anything with `nodes` and `info`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from scorekit.adapters.shared import severities_of
from scorekit.config import check_config
from scorekit.credit import (
    SEVERITY_WEIGHTS,
    AdvantageNorm,
    compute_advantages,
    decode_completion,
)
from scorekit.credit.assign import align_scored
from scorekit.credit.text_parts import positions_of
from scorekit.errors import UserError
from scorekit.rewards import TokenRewards
from scorekit.rewards.definition import TokenRewardConfig
from scorekit.rewards.tokens import token_rewards_of
from scorekit.schemas import ErrorSpan

log = logging.getLogger(__name__)
#: The key of `trace.info` that our tasks for verifiers write.
INFO = "scorekit"


def span_advantages(
    traces: Sequence[Any],
    tokenizer: Any,
    *,
    severity_weights: Mapping[str, float | None] | None = None,
    span_component: str | None = None,
    norm: AdvantageNorm = "group",
    stop_ids: Sequence[int] | None = None,
) -> list[list[float]]:
    """Return the advantages of the traces of one prompt: [B, T], one for each sampled token.

    Reward of the trace plus the rewards of its error spans on their tokens, normalized as `norm`
    says (`scorekit.credit.compute_advantages`). A token that the service has not read gets 0, and
    so does each token of a trace whose spans do not fit its ids, or whose component has failed (one
    with weight 0 may): that one is logged, and is in no mean. prime-rl leaves tokens with 0 out of
    the loss (`filter_zero_advantages`, its default).

    The rewards of tokens are those of the definition's `token_rewards`. Where it has none:
    span_component: the component whose spans count; None: the only one.
    severity_weights: None: those of `scorekit.credit`.
    tokenizer: of the policy.
    stop_ids: ids that end a completion and are no part of its text; None: the tokenizer's EOS.
    Raises UserError for a trace of another task, for a span component that does not exist or has no
    effect, and for a severity without a weight; ValueError for an argument without a meaning.
    """
    eos = tokenizer.eos_token_id
    stops = ([] if eos is None else [eos]) if stop_ids is None else stop_ids
    ids = [sampled_ids(trace) for trace in traces]
    credits = [
        _credit(trace, trace_ids, tokenizer, span_component, severity_weights, stops)
        for trace, trace_ids in zip(traces, ids, strict=True)
    ]
    return compute_advantages(
        rewards=[
            None if credit is None else _info(trace)["reward"]
            for trace, credit in zip(traces, credits, strict=True)
        ],
        token_rewards=[
            [0.0] * len(trace_ids) if credit is None else credit.rewards
            for trace_ids, credit in zip(ids, credits, strict=True)
        ],
        valid=[
            [False] * len(trace_ids) if credit is None else credit.valid
            for trace_ids, credit in zip(ids, credits, strict=True)
        ],
        groups=[0] * len(traces),
        norm=norm,
    )


def sampled_ids(trace: Any) -> list[int]:
    """Return the ids of a trace's one turn. Raises UserError if it has another number of turns."""
    nodes = [node for node in trace.nodes if any(node.mask)]
    if len(nodes) != 1:
        raise UserError(
            f"a trace has {len(nodes)} turns with token ids, and spans belong to one. Use the "
            "translation task, and verifiers' training client"
        )
    (node,) = nodes
    return [id for id, is_sampled in zip(node.token_ids, node.mask, strict=True) if is_sampled]


def _info(trace: Any) -> dict[str, Any]:
    info: dict[str, Any] | None = trace.info.get(INFO)
    if info is None or "mt" not in info:
        raise UserError(
            f"trace.info[{INFO!r}]: no scored translation. Use the task of "
            "scorekit.adapters.verifiers for each source of this algorithm"
        )
    return info


def _credit(
    trace: Any,
    ids: Sequence[int],
    tokenizer: Any,
    span_component: str | None,
    severity_weights: Mapping[str, float | None] | None,
    stop_ids: Sequence[int],
) -> TokenRewards | None:
    """Return the rewards of one trace's tokens; None: no spans, or they do not fit its ids."""
    info = _info(trace)
    if info["is_refused_text"]:  # no service has read it; its reward counts for all of it
        return TokenRewards([0.0] * len(ids), [True] * len(ids))
    config = _token_config(info, span_component, severity_weights)
    if missing := config.weighted - info["spans"].keys():
        _check_failed(info, missing)
        log.warning("trace %s has no error spans, and is left out: they failed", trace.id)
        return None
    text = info["mt"]
    raw = decode_completion(tokenizer, ids[:-1] if ids[-1] in stop_ids else ids)
    begin = raw.rfind(text)  # what comes before is a think block, which may quote it
    if repeats := info["mt_repeats"]:
        positions = positions_of(text, raw)
        begin = positions[-1 - repeats] if len(positions) > repeats else len(raw)
    try:
        alignment = align_scored(
            tokenizer,
            ids,
            text=text,
            text_start=None if begin < 0 or repeats is None else begin,
            stop_ids=stop_ids,
        )
        answers = {name: _Answer(**info["spans"][name]) for name in config.weighted}
        tokens = token_rewards_of(config, answers, text, alignment.offsets)
        if tokens is None:
            raise ValueError("a span is outside the text")
        return tokens
    except ValueError as error:
        log.warning("trace %s has no token rewards, and is left out: %s", trace.id, error)
        return None


def _check_failed(info: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise UserError if a component without error spans has answered: it marks none, ever."""
    for name in sorted(names):
        if info["components"].get(f"component/{name}") is not None:
            raise UserError(
                f"token_rewards: {name!r} marks no error spans. Name a component that does "
                "(xcomet, or a judge with task mqm)"
            )


class _Answer(BaseModel):
    """The parts of a service's answer that a trace has."""

    error_spans: list[ErrorSpan]
    omissions: list[ErrorSpan] | None = None
    mt_covered: int


def _token_config(
    info: Mapping[str, Any],
    component: str | None,
    severity_weights: Mapping[str, float | None] | None,
) -> TokenRewardConfig:
    """Return which spans become rewards of tokens, and what they weigh.

    info: of the trace; its `token_rewards` are those of the reward's definition, if it has some.
    component, severity_weights: as of `span_advantages`, for a definition without them.
    Raises UserError for a setting without an effect.
    """
    if section := info.get("token_rewards"):
        if component is not None or severity_weights is not None:
            raise UserError(
                "span_component and severity_weights have no effect beside token_rewards of the "
                "definition. Set them in there"
            )
        return check_config(TokenRewardConfig, section, "token_rewards")
    weights = SEVERITY_WEIGHTS if severity_weights is None else severity_weights
    options = {
        "severity_weights": severities_of(weights),
        "spans": {_marking(info, component): 1.0},
    }
    return check_config(TokenRewardConfig, options, "span_advantages")


def _marking(info: Mapping[str, Any], component: str | None) -> str:
    """Return the component whose spans count, which may have failed for this text."""
    spans: Mapping[str, dict[str, Any]] = info["spans"]
    if component is None and len(spans) == 1:
        return next(iter(spans))
    if component is not None and component in spans:
        return component
    failed = {
        name.removeprefix("component/")
        for name, value in info["components"].items()
        if name.startswith("component/") and value is None
    }
    if component in failed or (component is None and not spans and failed):
        return component or min(failed)
    names = ", ".join(spans) or "none"
    raise UserError(
        f"span_component: {component!r} marks no error spans. Set one of those that do: {names}"
    )
