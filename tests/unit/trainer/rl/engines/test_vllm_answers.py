"""Answers of vLLM servers: which weights sampled each token, and what is no completion."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.rl.config import SamplingConfig
from trainer.rl.engines.vllm_protocol import (
    FAULT_CAUSES,
    HINTS,
    IDS_ROUTE,
    MAX_LOGPROB,
    TEXT_ROUTE,
    InvalidCompletion,
    Request,
    UnknownWeights,
    VLLMTurn,
    completions,
    request,
    version_label,
)
from trainer.rl.engines.vllm_weights import Weights
from trainer.rl.sampler import SampledCompletion

RUN = "owner-run"
PROMPT = [1, 2]
STOP, BANNED, VOCABULARY, MAX_TOKENS = 0, 9, 20, 5
#: The update of the request's weights, and of the newest that a server may have.
UPDATE, NEWEST = 3, 12
Choice = dict[str, Any]
Change = Callable[[dict[str, Any], Choice], Any]


def make_request(has_labels: bool, n: int = 1, with_logprobs: bool = True) -> Request:
    gen_cfg = SamplingConfig(max_new_tokens=MAX_TOKENS, num_samples_per_prompt=n)
    turn = VLLMTurn(PROMPT, (), gen_cfg, seed=5, with_logprobs=with_logprobs, order=0)
    weights = Weights("m", Path("weights"), version_label(RUN, UPDATE), UPDATE)
    return request(
        turn,
        weights,
        has_labels,
        {"alias"},
        vocabulary_size=VOCABULARY,
        stops=[STOP],
        banned_token_ids=[BANNED],
        image_id=None,
    )


def span(update: int, start: int, end: int) -> dict[str, Any]:
    return {"version": version_label(RUN, update), "start": start, "end": end}


def make_choice(ids: list[Any], has_labels: bool, index: int = 0) -> Choice:
    """Return a choice as vLLM 0.32 writes it, for each of its routes."""
    reason = "stop" if ids[-1:] == [STOP] else "length"
    choice = {"index": index, "token_ids": ids, "finish_reason": reason, "stop_reason": None}
    if has_labels:
        content = [{"token_id": token_id, "logprob": -0.5} for token_id in ids]
        spans = [span(UPDATE, 0, len(ids))]
        return choice | {"logprobs": {"content": content}, "weight_versions": spans}
    logprobs = {"token_logprobs": [-0.5] * len(ids)}
    return choice | {"logprobs": logprobs, "prompt_token_ids": PROMPT}


def make_answer(choices: list[Choice], has_labels: bool) -> dict[str, Any]:
    num_sampled = sum(len(choice["token_ids"]) for choice in choices)
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": num_sampled}
    answer = {"model": "m", "choices": choices, "usage": usage}
    return answer | ({"prompt_token_ids": PROMPT} if has_labels else {})


def read(answer: Any, prompt_request: Request) -> list[SampledCompletion]:
    return completions(answer, prompt_request, "http://server", NEWEST)


def put(key: str, value: Any) -> Change:
    """Return a change of a key of the choice."""
    return lambda answer, choice: choice.__setitem__(key, value)


def in_answer(key: str, value: Any) -> Change:
    return lambda answer, choice: answer.__setitem__(key, value)


def ids_and_reason(ids: list[Any], reason: Any = "length") -> Change:
    """Return a change of the ids; all that depends on them fits."""

    def change(answer: dict[str, Any], choice: Choice) -> None:
        has_labels = "weight_versions" in choice
        choice.clear()
        choice.update(make_choice(ids, has_labels) | {"finish_reason": reason})
        answer["usage"]["completion_tokens"] = len(ids)

    return change


def put_logprob(value: Any) -> Change:
    def change(answer: dict[str, Any], choice: Choice) -> None:
        if "content" in choice["logprobs"]:
            choice["logprobs"]["content"][1]["logprob"] = value
        else:
            choice["logprobs"]["token_logprobs"][1] = value

    return change


def drop_logprob(answer: dict[str, Any], choice: Choice) -> None:
    (values,) = choice["logprobs"].values()
    values.pop()


def put_usage(key: str, value: Any) -> Change:
    return lambda answer, choice: answer["usage"].__setitem__(key, value)


FULL = [5, 6, 7, 8, 4]
#: What a server may answer -> what is said of it, and the cause that it is counted under.
INVALID: dict[str, tuple[Change, str, str]] = {
    "aborted": (ids_and_reason([5], "abort"), "unfinished", "finish_reason 'abort' after 1 of 5"),
    "aborted at once": (ids_and_reason([], "abort"), "unfinished", "'abort' after 0 of 5"),
    "aborted at the limit": (ids_and_reason(FULL, "abort"), "unfinished", "'abort' after 5 of 5"),
    "aborted after the end": (ids_and_reason([5, STOP], "abort"), "unfinished", "'abort'"),
    "no reason": (ids_and_reason(FULL, None), "unfinished", "no finish_reason after 5 of 5"),
    "error": (ids_and_reason(FULL, "error"), "unfinished", "'error'"),
    "filtered": (ids_and_reason(FULL, "content_filter"), "unfinished", "'content_filter'"),
    "tool calls": (ids_and_reason(FULL, "tool_calls"), "unfinished", "'tool_calls'"),
    "repetition": (ids_and_reason([5, 5, 5], "repetition"), "unfinished", "'repetition'"),
    "another word": (ids_and_reason(FULL, ["stop"]), "unfinished", "finish_reason"),
    "stop without a stop id": (ids_and_reason(FULL, "stop"), "unfinished", "without a stop id"),
    "too short": (ids_and_reason([5, 6], "length"), "unfinished", "'length' after 2 of 5 ids"),
    "empty": (ids_and_reason([], "length"), "unfinished", "'length' after 0 of 5 ids"),
    "too long": (ids_and_reason([*FULL, 4]), "ids", "6 ids, where 1 to 5 were requested"),
    "after the stop id": (ids_and_reason([5, STOP, 6, 7, 8]), "ids", "3 ids after the stop id 0"),
    "two stop ids": (ids_and_reason([5, STOP, STOP], "stop"), "ids", "1 ids after the stop id 0"),
    "banned": (ids_and_reason([5, BANNED, 7, 8, 4]), "ids", "id 9, which must not be sampled"),
    "outside": (ids_and_reason([5, VOCABULARY, 7, 8, 4]), "ids", "id 20, but the policy has 20"),
    "negative": (ids_and_reason([5, -1, 7, 8, 4]), "ids", "id -1"),
    "float": (ids_and_reason([5, 6.0, 7, 8, 4]), "ids", "an id that is '6.0'"),
    "bool": (ids_and_reason([5, True, 7, 8, 4]), "ids", "an id that is 'True'"),
    "text": (ids_and_reason([5, "6", 7, 8, 4]), "ids", "an id that is '6'"),
    "null": (ids_and_reason([5, None, 7, 8, 4]), "ids", "an id that is 'None'"),
    "counted otherwise": (put_usage("completion_tokens", 4), "ids", "5 ids, but says 4"),
    "nan": (put_logprob(math.nan), "logprobs", "a log-probability of nan"),
    "minus infinity": (put_logprob(-math.inf), "logprobs", "-inf"),
    "as vllm writes it": (put_logprob(-9999.0), "logprobs", "-9999"),
    "no number": (put_logprob(None), "logprobs", "None"),
    "a bool": (put_logprob(False), "logprobs", "False"),
    "positive": (put_logprob(0.1), "logprobs", "a log-probability of 0.1"),
    "one too few": (drop_logprob, "logprobs", "4 log-probabilities for 5 ids"),
    "none": (put("logprobs", None), "logprobs", "no log-probabilities"),
    "counted prompt": (put_usage("prompt_tokens", 1), "prompt", "1 ids, 2 requested"),
    "other model": (in_answer("model", "n"), "weights", "of the model 'n'"),
    "index": (put("index", 1), "choices", "the index 1 for n = 1"),
    "bool index": (put("index", False), "choices", "the index False"),
    "no choices": (in_answer("choices", []), "choices", "0 completions for n = 1"),
    "choices missing": (lambda answer, choice: answer.pop("choices"), "format", "KeyError"),
    "choices null": (in_answer("choices", None), "format", "TypeError"),
    "no choice": (in_answer("choices", [None]), "format", "TypeError"),
    "ids missing": (lambda answer, choice: choice.pop("token_ids"), "format", "KeyError"),
    "ids null": (put("token_ids", None), "format", "TypeError"),
    "ids a text": (put("token_ids", "56784"), "format", "TypeError"),
}


@pytest.mark.parametrize("has_labels", [False, True], ids=["texts", "ids"])
@pytest.mark.parametrize("name", INVALID)
def test_an_answer_that_is_no_completion_is_refused(name: str, has_labels: bool) -> None:
    change, cause, message = INVALID[name]
    answer = make_answer([make_choice(list(FULL), has_labels)], has_labels)
    prompt_request = make_request(has_labels)
    assert read(answer, prompt_request)[0].token_ids == FULL
    change(answer, answer["choices"][0])
    with pytest.raises(InvalidCompletion) as caught:
        read(answer, prompt_request)
    assert caught.value.cause == cause and message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_cause_has_a_hint_and_a_test() -> None:
    assert {cause for _, cause, _ in INVALID.values()} == set(FAULT_CAUSES) == set(HINTS)


@pytest.mark.parametrize("answer", [None, [], "text", 7, {}, {"error": "no"}])
def test_what_is_no_answer_at_all_is_refused(answer: Any) -> None:
    with pytest.raises(InvalidCompletion) as caught:
        read(answer, make_request(False))
    assert caught.value.cause == "format"


@pytest.mark.parametrize("has_labels", [False, True], ids=["texts", "ids"])
def test_another_prompt_than_that_of_the_request_is_refused(has_labels: bool) -> None:
    answer = make_answer([make_choice(list(FULL), has_labels)], has_labels)
    (answer if has_labels else answer["choices"][0])["prompt_token_ids"] = [1, 3]
    with pytest.raises(InvalidCompletion, match="of another prompt") as caught:
        read(answer, make_request(has_labels))
    assert caught.value.cause == "prompt"


def test_log_probabilities_of_other_ids_are_refused() -> None:
    answer = make_answer([make_choice(list(FULL), True)], True)
    answer["choices"][0]["logprobs"]["content"][2]["token_id"] = 15
    with pytest.raises(InvalidCompletion, match="log-probabilities of other ids"):
        read(answer, make_request(True))


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([5, STOP], "stop"),
        ([STOP], "stop"),
        (FULL, "length"),
        ([5, 6, 7, 8, STOP], "stop"),
        ([5, 6, 7, 8, STOP], "length"),  # the limit was tested before the stop id
        ([VOCABULARY - 1, STOP], "stop"),
    ],
)
@pytest.mark.parametrize("has_labels", [False, True], ids=["texts", "ids"])
def test_a_completion_ends_with_a_stop_id_or_at_its_limit(
    ids: list[int], reason: str, has_labels: bool
) -> None:
    answer = make_answer([make_choice(ids, has_labels) | {"finish_reason": reason}], has_labels)
    (completion,) = read(answer, make_request(has_labels))
    assert completion.token_ids == ids
    assert completion.logprobs == [-0.5] * len(ids) and completion.versions == [3] * len(ids)


@pytest.mark.parametrize("value", [MAX_LOGPROB, 0, 0.0, -0.0, -104.0, -20])
def test_rounding_may_put_a_log_probability_a_little_above_zero(value: float) -> None:
    answer = make_answer([make_choice(list(FULL), False)], False)
    put_logprob(value)(answer, answer["choices"][0])
    (completion,) = read(answer, make_request(False))
    assert completion.logprobs is not None and completion.logprobs[1] == value


def test_what_the_server_does_not_say_is_not_compared() -> None:
    answer = make_answer([make_choice(list(FULL), False)], False)
    for field in ("model", "usage"):
        del answer[field]
    del answer["choices"][0]["prompt_token_ids"]
    assert read(answer, make_request(False))[0].token_ids == FULL


def test_a_server_may_call_its_own_model_by_another_of_its_names() -> None:
    answer = make_answer([make_choice(list(FULL), False)], False) | {"model": "alias"}
    assert read(answer, make_request(False))[0].token_ids == FULL


def test_log_probabilities_that_were_not_requested_are_not_read() -> None:
    answer = make_answer([make_choice(list(FULL), False)], False)
    put_logprob(math.nan)(answer, answer["choices"][0])
    assert read(answer, make_request(False, with_logprobs=False))[0].logprobs is None
    del answer["choices"][0]["logprobs"]  # a gateway may drop what is null
    assert read(answer, make_request(False, with_logprobs=False))[0].logprobs is None


def test_choices_are_in_the_order_of_their_index() -> None:
    choices = [make_choice([5 + index, STOP], False, index) for index in (2, 0, 1)]
    sampled = read(make_answer(choices, False), make_request(False, n=3))
    assert [completion.token_ids[0] for completion in sampled] == [5, 6, 7]


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([0, 0], "two choices with the index 0"),
        ([0, 2], "the index 2 for n = 2"),
        ([1], "1 completions for n = 2"),
        ([0, 1, 1], "two choices with the index 1"),
    ],
)
def test_each_choice_comes_once(indices: list[int], message: str) -> None:
    answer = make_answer([make_choice([5, STOP], False, index) for index in indices], False)
    with pytest.raises(InvalidCompletion, match=message):
        read(answer, make_request(False, n=2))


def test_one_choice_that_was_broken_off_is_enough() -> None:
    choices = [make_choice([5, STOP], False, index) for index in range(3)]
    choices[1]["finish_reason"] = "abort"
    with pytest.raises(InvalidCompletion, match="'abort' after 2 of 5 ids"):
        read(make_answer(choices, False), make_request(False, n=3))


# -- weights ---------------------------------------------------------------------------------------


def labeled(*spans: dict[str, Any], ids: list[int] | None = None) -> dict[str, Any]:
    choice = make_choice(list(ids or FULL), True) | {"weight_versions": list(spans)}
    return make_answer([choice], True)


def test_tokens_have_the_versions_of_their_spans() -> None:
    (completion,) = read(labeled(span(3, 0, 2), span(12, 2, 5)), make_request(True))
    assert completion.versions == [3, 3, 12, 12, 12]


def test_without_labels_all_tokens_have_the_version_of_the_request() -> None:
    (completion,) = read(make_answer([make_choice([5, STOP], False)], False), make_request(False))
    assert completion.versions == [3, 3]
    assert make_request(False).route == TEXT_ROUTE
    assert make_request(True).route == IDS_ROUTE


@pytest.mark.parametrize(
    "label", ["default", "other-run-000003", f"unfinished {RUN}-000003", f"{RUN}-x", f"{RUN}-²"]
)
def test_tokens_of_other_weights_are_refused(label: str) -> None:
    spans = [span(3, 0, 1), span(3, 1, 5) | {"version": label}]
    with pytest.raises(UnknownWeights, match="not with this run's"):
        read(labeled(*spans), make_request(True))


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([span(3, 0, 1)], "1 weight versions for 5 ids"),
        ([], "0 weight versions for 5 ids"),
        ([span(NEWEST + 1, 0, 5)], "of update 13, where 3 to 12 are possible"),
        ([span(3, 0, 2), span(NEWEST + 1, 2, 5)], "of update 13"),
        ([span(2, 0, 5)], "of update 2, where 3 to 12 are possible"),
        ([span(5, 0, 2), span(4, 2, 5)], "of update 4, where 5 to 12 are possible"),
        ([span(3, 0, 3), span(4, 2, 5)], "weight versions of ids 2 to 5"),
        ([span(3, 0, 2), span(4, 3, 5)], "weight versions of ids 3 to 5"),
        ([span(3, 0, 6)], "weight versions of ids 0 to 6"),
        ([span(3, 0, 10**12)], "weight versions of ids 0 to"),
        ([span(3, 0, 0), span(3, 0, 5)], "weight versions of ids 0 to 0"),
    ],
)
def test_spans_cover_all_ids_with_possible_weights(
    spans: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(InvalidCompletion, match=message) as caught:
        read(labeled(*spans), make_request(True))
    assert caught.value.cause == "weights"


def test_a_server_that_labels_no_tokens_any_more_is_refused() -> None:
    answer = make_answer([make_choice(list(FULL), True)], True)
    del answer["choices"][0]["weight_versions"]
    with pytest.raises(InvalidCompletion) as caught:
        read(answer, make_request(True))
    assert caught.value.cause == "format"
