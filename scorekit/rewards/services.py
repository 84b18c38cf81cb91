"""Components that are values of a service's answer: what is sent, and what is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from scorekit.config import check_config
from scorekit.errors import UserError
from scorekit.rewards.definition import (
    LIST_FIELDS,
    ComponentConfig,
    RewardDefinition,
    ServiceRequest,
)
from scorekit.rewards.formula import component_result, missing_component
from scorekit.rewards.results import STATUSES, ComponentResult
from scorekit.schemas import (
    Failed,
    Info,
    JudgeOptions,
    JudgeScored,
    MetricXOptions,
    Options,
    Result,
    Scored,
    XCometOptions,
)

#: A source that is refused with this translation is refused with any.
SHORTEST = "."
#: The options of each kind of service. Another kind checks its own.
_OPTIONS: dict[str, type[Options]] = {
    "metricx": MetricXOptions,
    "xcomet": XCometOptions,
    "judge": JudgeOptions,
}
#: The judge's task that marks errors; it has languages in place of a rubric's variables.
_MQM = "mqm"
_MQM_VARIABLES = {name: name for name in ("src", "mt", "src_lang", "tgt_lang")}


def request_key(request: ServiceRequest) -> str:
    """Return a key that is equal for requests that get the same answer.

    A `model` only says what must run there, and a slash at a URL's end changes nothing."""
    values = request.model_dump(mode="json", exclude={"model"})
    values["service"] = [url.rstrip("/") for url in request.service or ()]
    return json.dumps(values, sort_keys=True)


def fields_of_request(request: ServiceRequest) -> dict[str, str]:
    """Return what a request sends of a sample: each variable, and the sample's field."""
    reference = {"ref": "ref"} if request.reference else {}
    if request.task is None:
        return {"src": "src", "mt": "mt"} | reference
    return dict(request.variables) if request.variables else _MQM_VARIABLES | reference


def request_body(
    key: str, request: ServiceRequest, sample: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, str]:
    """Return the body of a sample's request, or None and the name of the field that it lacks."""
    names = fields_of_request(request)
    body = {"task": request.task} if request.task is not None else {}
    for variable, name in names.items():
        value = sample.get(name)
        if value is None or (value == "" and name not in ("src", "mt")):
            return None, name
        if not isinstance(value, str):
            raise UserError(
                f"{key}: the sample's field {name!r} is {type(value).__name__}. Give it as text"
            )
        body[variable] = value
    return body, ""


def check_request(key: str, request: ServiceRequest, info: Info) -> None:
    """Raise UserError if a service does not fit a request. key: of the component's config."""
    url = (request.service or ("",))[0]
    if request.model is not None and request.model != info.model:
        raise UserError(
            f"{key}.model: {url} runs {info.model!r}, not {request.model!r}. Correct one of them"
        )
    if info.service in _OPTIONS:
        check_config(_OPTIONS[info.service], request.options, f"{key}.options")
    is_judge = info.service == "judge"
    if is_judge != (request.task is not None):
        hint = "Name a task" if is_judge else "Remove task"
        raise UserError(f"{key}.task: {url} is a {info.service} service. {hint}")
    if request.task is not None:
        tasks = info.tasks or {}
        if request.task == _MQM and tasks and _MQM not in tasks:
            raise UserError(f"{key}.task: the judge at {url} has no task mqm. Choose a rubric")
        if request.task != _MQM and not request.variables:
            raise UserError(f"{key}.variables: required. Name the variables of the rubric")
    reference = (info.inputs or {}).get("ref")
    if reference == "required" and not request.reference:
        raise UserError(f"{key}.reference: {info.model} needs references. Set it to true")


def check_direction(key: str, config: ComponentConfig, info: Info) -> None:
    """Raise UserError if the reward would rise where the service's score gets worse."""
    factor = config.weight * config.scale
    if config.field == "score":
        is_higher_better = info.higher_is_better_in(config.task)
    elif config.field == "pass":
        is_higher_better = True
    elif config.field in LIST_FIELDS and not config.severity_weights:
        is_higher_better = False
    else:
        return
    if factor and (factor > 0) != is_higher_better:
        direction = "higher" if is_higher_better else "lower"
        raise UserError(
            f"{key}: {direction} values of `{config.field}` are better at {info.service}, but "
            f"weight * scale is {factor:g}. Change the sign of `scale`"
        )


def checks(definition: RewardDefinition, names: list[str], info: Info) -> None:
    """Raise UserError if a service does not fit one of these components."""
    for name in names:
        config = definition.components[name]
        check_request(f"components.{name}", config, info)
        check_direction(f"components.{name}", config, info)


def service_component(config: ComponentConfig, result: Result) -> ComponentResult:
    """Return the component that a service's result gives."""
    if isinstance(result, Failed):
        error = result.error
        status = error.type if error.type in STATUSES else "upstream"
        message = f"{error.message}" if status == error.type else f"{error.type}: {error.message}"
        return missing_component(
            config, status, message, is_transient=error.retryable, answer=result
        )
    raw, reason = _value(config, result)
    if raw is None:
        return missing_component(config, "no_value", reason, answer=result)
    return component_result(raw, config, result)


def _value(config: ComponentConfig, result: Scored | JudgeScored) -> tuple[float | None, str]:
    """Return the value of the component's field, or None and the reason."""
    if config.field == "score":
        return result.score, ""
    if config.field == "pass":
        if isinstance(result, JudgeScored):
            return float(result.verdict.passed), ""
        return None, "the answer has no verdict"
    value = getattr(result, config.field, None)
    if value is None:
        return None, f"the answer has no {config.field}"
    if config.field == "mt_covered":
        return float(value), ""
    if not config.severity_weights:
        return float(len(value)), ""
    weights = {severity.upper(): weight for severity, weight in config.severity_weights.items()}
    unknown = sorted({entry.severity for entry in value} - weights.keys())
    if unknown:
        return None, f"severity_weights: no weight of {', '.join(unknown)}"
    return sum((weights[entry.severity] for entry in value), 0.0), ""
