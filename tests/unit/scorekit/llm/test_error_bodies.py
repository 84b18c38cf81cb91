"""Check what the errors of LLM servers mean. The bodies are those of public reports and sources."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scorekit.errors import UserError
from scorekit.llm import LLMError
from scorekit.llm.errors import explain, stated_status


def openai(message: str, code: Any = None, type: Any = "invalid_request_error") -> dict[str, Any]:
    return {"error": {"message": message, "type": type, "param": "messages", "code": code}}


def vllm(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}


def older_vllm(message: str) -> dict[str, Any]:
    fields = {"object": "error", "message": message, "type": "BadRequestError", "param": None}
    return fields | {"code": 400}


def anthropic(message: str, type: str = "invalid_request_error") -> dict[str, Any]:
    return {"type": "error", "error": {"type": type, "message": message}, "request_id": "req_1"}


def gemini(message: str) -> list[dict[str, Any]]:
    return [{"error": {"code": 400, "message": message, "status": "INVALID_ARGUMENT"}}]


def litellm(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": None, "param": None, "code": "400"}}


def tgi(message: str) -> dict[str, Any]:
    return {"error": message, "error_type": "validation"}


def meaning(status: int, body: Any, key: str | None = None) -> LLMError | UserError:
    text = body if isinstance(body, str) else json.dumps(body)
    authorization = None if key is None else f"Bearer {key}"
    return explain(
        status,
        {},
        text.encode(),
        url="http://u/v1",
        model="m",
        authorization=authorization,
        request_id="r",
    )


OF_4096 = "This model's maximum context length is 4096 tokens."
NEWER = "Your input exceeds the context window of this model. Please adjust your input."
SUM = "input length and `max_tokens` exceed context limit: 199759 + 8192 > 200000, decrease input"
TGI_SUM = "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 2048. Given: 3474"
LLAMA = "the request exceeds the available context size. try increasing the context size"
NESTED = 'litellm.BadRequestError: AnthropicException - b\'{"type":"error","message":"'


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, openai(f"{OF_4096} However, you requested 4118.", "context_length_exceeded")),
        (400, openai(NEWER, "context_length_exceeded")),
        (400, openai(NEWER)),
        (422, NEWER),
        (400, openai("too long", "context_length_exceeded")),
        (500, openai("", "context_length_exceeded", "server_error")),
        (400, openai(f"{OF_4096} However, you requested 4118 tokens.", "invalid_request_error")),
        (400, openai("Input tokens exceed the configured limit of 272000 tokens. Your messages")),
        (400, anthropic("prompt is too long: 207791 tokens > 200000 maximum")),
        (400, anthropic(SUM)),
        (413, "Prompt is too long"),
        (400, {"message": "Input is too long for requested model."}),
        (400, gemini("The input token count (1200293) exceeds the maximum number of tokens")),
        (400, gemini("The input token count exceeds the maximum number of tokens allowed (9).")),
        (400, vllm(f"{OF_4096} However, you requested 5000 tokens (4900 in the messages, 100")),
        (400, older_vllm(f"{OF_4096} However, you requested 5000 tokens. Please reduce")),
        (400, vllm("The decoder prompt (length 21535) is longer than the maximum model length")),
        (400, vllm("Input length (5000) exceeds model's maximum context length (4096).")),
        (400, vllm(f"{OF_4096} However, your prompt contains at least 4097 input tokens, which")),
        (400, vllm(f"'max_tokens' is too large: 2000. {OF_4096[:-1]} and your request has 2104")),
        (400, older_vllm("The input (61709 tokens) is longer than the model's context length")),
        (400, older_vllm("Requested token count exceeds the model's maximum context length of 9.")),
        (400, older_vllm("Input length (160062 tokens) exceeds the maximum allowed length (59862")),
        (500, {"error": {"code": 500, "message": LLAMA, "type": "exceed_context_size_error"}}),
        (400, {"error": {"code": 400, "message": "long", "type": "exceed_context_size_error"}}),
        (400, "request (1407 tokens) exceeds the available context size (256 tokens), try"),
        (500, openai("Requested tokens (516) exceed context window of 512")),
        (422, tgi(TGI_SUM)),
        (422, tgi("Input validation error: `inputs` must have less than 1024 tokens. Given: 1500")),
        (400, {"error": "the input length exceeds the context length"}),
        (400, {"error": "prompt too long; exceeded max context length by 4 tokens"}),
        (400, openai("The number of tokens to keep is greater than the context length.")),
        (400, litellm(f"{NESTED}{SUM}\"}}}}'. Received Model Group=claude")),
        (400, litellm("ContextWindowExceededError: litellm.BadRequestError: Context Window")),
        (400, litellm("x" * 1000 + f" AnthropicError - prompt is too long: 9 > 8. {NESTED}")),
        (400, {"error": {"message": f"This endpoint's {OF_4096[13:]} However", "code": 400}}),
        (400, {"message": "Prompt contains 9 tokens, too large for model with 8 maximum context le"
            "ngth", "type": "invalid_request_prompt", "code": "3051"}),
        (400, {"code": "x", "error": "This model's maximum prompt length is 131072 but"}),
        (413, openai("Please reduce the length of the messages or completion.")),
        (400, {"message": "too many tokens: number of tokens in the prompt cannot exceed 81"}),
        (400, openai("Range of input length should be [1, 30720]", "InvalidParameter")),
        (400, openai("Your request exceeded model token limit: 262144 (requested: 283172)")),
        (400, {"error": {"message": "invalid params, context window exceeds limit"}}),
        (400, {"detail": [{"loc": ["body"], "msg": f"Value error, {OF_4096} However, you"}]}),
    ],
)  # fmt: skip
def test_a_prompt_that_does_not_fit_the_context_is_overlong(status: int, body: Any) -> None:
    error = meaning(status, body)
    assert isinstance(error, LLMError), error
    assert (error.type, error.retryable, error.status) == ("overlong", False, status)


TPM = "Request too large for model `m` on tokens per minute (TPM): Limit 6000, Requested 7000"


@pytest.mark.parametrize(
    ("status", "body", "type"),
    [
        (400, openai("max_tokens must be at least 1, got 0."), "refused"),
        (400, openai("max_tokens is too large: 32000. This model supports at most 16384 completion "
            "tokens, whereas you provided 32000.", "invalid_value"), "refused"),
        (400, anthropic("max_tokens: 50000 > 8192, which is the maximum allowed number of output "
            "tokens for claude"), "refused"),
        (422, tgi("Input validation error: `max_new_tokens` must be <= 192."), "refused"),
        (413, openai(TPM, "rate_limit_exceeded", "tokens"), "refused"),
        (413, openai(f"{TPM}, please reduce the length of the messages"), "refused"),
        (429, openai(f"{TPM}. The input or output tokens must be reduced", "rate_limit_exceeded"),
            "overloaded"),
        (429, {"message": "Too many tokens, please wait before trying again."}, "overloaded"),
        (400, {"__type": "ThrottlingException", "message": "Too many tokens, please wait before "
            "trying again."}, "refused"),
        (429, openai(f"{OF_4096} is not the reason: rate limit reached"), "overloaded"),
        (503, "prompt is too long", "unreachable"),
        (400, openai("Invalid image: it exceeds the maximum size of 20 MB", "image_too_large"),
            "refused"),
        (400, anthropic("messages.0.content.1.image.source.base64: image exceeds 5 MB maximum: "
            "6 MB > 5242880 bytes"), "refused"),
        (400, openai("Invalid 'tools[0].function.name': string too long. Expected a string with "
            "maximum length 64", "string_above_max_length"), "refused"),
        (400, openai("Model context window too small (minimum is 128k tokens)"), "refused"),
        (400, vllm("Stop sequences must not be empty"), "refused"),
        (400, {"detail": [{"loc": ["body", "n"], "msg": "Input should be valid",
            "input": {"messages": "the prompt is too long"}}]}, "refused"),
        (413, anthropic("Request exceeds the maximum size", "request_too_large"), "refused"),
        (500, "Internal Server Error", "server_error"),
    ],
)  # fmt: skip
def test_another_refusal_is_not_overlong(status: int, body: Any, type: str) -> None:
    error = meaning(status, body)
    assert isinstance(error, LLMError) and (error.type, error.cause) == (type, None)


FILTERED = "The response was filtered due to the prompt triggering Azure OpenAI's content managem"
AZURE = {"code": "ResponsibleAIPolicyViolation", "content_filter_result": {}}


@pytest.mark.parametrize(
    "body",
    [
        openai("...", "content_filter", None),
        {"error": {"message": "x", "code": None, "innererror": AZURE}},
        openai(f"{FILTERED}ent policy.", None, None),
        litellm(f"litellm.ContentPolicyViolationError: AzureException - {FILTERED}"),
        openai("Your request was rejected", "content_policy_violation"),
        openai("Input data may contain inappropriate content.", "data_inspection_failed"),
    ],
)
def test_a_prompt_that_a_filter_refused_is_named_and_not_asked_again(body: Any) -> None:
    error = meaning(400, body)
    assert isinstance(error, LLMError)
    assert (error.type, error.cause, error.retryable) == ("refused", "filtered_prompt", False)


def test_an_error_that_comes_with_status_200_states_its_own() -> None:
    stated = {"error": {"code": 400, "message": LLAMA, "type": "exceed_context_size_error"}}
    assert stated_status(json.dumps(stated).encode()) == 400
    assert stated_status(b'{"error": {"message": "overloaded", "code": 529}}') == 529
    for code in ("7", '"400"', "true", "null", "99999999999"):
        assert stated_status(b'{"error": {"message": "x", "code": %s}}' % code.encode()) == 500
    for no_error in (b"", b"[]", b"{}", b'{"error": null, "choices": []}', b'{"choices": []}'):
        assert stated_status(no_error) is None


@pytest.mark.parametrize("status", [400, 401, 402, 404, 429, 500])
def test_no_error_repeats_a_server_raw(status: int) -> None:
    body = json.dumps({"error": {"message": "\x1b[2J line\nend open-sesame sk-12345678901234"}})
    words = meaning(status, body, key="open-sesame")
    assert str(words).isprintable() and "sesame" not in str(words) and "sk-123" not in str(words)


def test_an_error_of_the_client_is_one_line_whatever_it_is_made_of() -> None:
    error = LLMError("malformed", "an answer\n\x1b[31m" + "x" * 10_000)
    assert str(error).isprintable() and len(str(error)) < 700
