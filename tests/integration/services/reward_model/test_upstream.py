"""Check `--upstream`: what vLLM and TEI are asked, and what their failures become.

The stand-in answers as vLLM 0.32 and Text Embeddings Inference do; each test fixes what it says.
`Tei` has a model, and the schema that TEI publishes: no build of TEI was in reach.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import SecretStr
from structlog.testing import capture_logs

from scorekit.client import SyncScoringClient
from scorekit.errors import UserError
from scorekit.schemas import Failed, RewardScored
from services.reward_model.__main__ import make_backend
from services.reward_model.prompts import BUILT_IN, PromptTurn, ScoringPrompt
from services.reward_model.settings import RewardModelSettings
from services.reward_model.upstream import UpstreamBackend
from testing.checkpoints.reward import make_reward_model, reference
from testing.servers import free_port, running_app, running_service

CHAT = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "Yes."}]
LABELS = {"good": 1.0, "bad": -0.5}


class Upstream:
    """A server of a classifier.

    outputs: by label, in its order.
    answers: given first, in order.
    is_hanging: requests get no answer.
    """

    def __init__(self, outputs: dict[str, float] | None = None, model: str = "rm") -> None:
        self.outputs = {"good": 0.5, "bad": 2.0} if outputs is None else outputs
        self.model = model
        self.answers: list[Any] = []
        self.requests: list[tuple[str, dict[str, Any], str | None]] = []
        self.is_hanging = False
        self.app = FastAPI()
        for path in ("/classify", "/pooling", "/score", "/predict"):
            self.app.post(path)(self.answer)

    async def answer(self, request: Request) -> Any:
        body = await request.json()
        self.requests.append((request.url.path, body, request.headers.get("authorization")))
        while self.is_hanging and not await request.is_disconnected():
            await asyncio.sleep(0.01)
        if self.answers:
            return self.answers.pop(0)
        values = list(self.outputs.values())
        row: dict[str, Any] = {"index": 0}
        if request.url.path == "/predict":
            rows = [{"label": name, "score": value} for name, value in self.outputs.items()]
            rows.sort(key=lambda entry: -entry["score"])
            return [rows] if isinstance(body["inputs"], list) else rows
        if request.url.path == "/classify":
            label = list(self.outputs)[values.index(max(values))]
            row |= {"probs": values, "label": label, "num_classes": len(values)}
        elif request.url.path == "/pooling":
            row["data"] = values
        else:
            row["score"] = values[0]
        return {"model": self.model, "data": [row], "usage": {"prompt_tokens": 7}}


def ask(upstream: Upstream | Tei, *samples: dict[str, Any], api: str = "classify", **settings: Any):
    """Return the results of the samples, asked through the service."""
    settings = {"weights": LABELS, "prompt": ("messages", BUILT_IN["messages"])} | settings
    with running_app(upstream.app) as url:
        backend = UpstreamBackend(
            settings.pop("url", url),
            "rm",
            settings.pop("weights"),
            api,
            settings.pop("prompt"),
            backoff_s=(0.0,),
            **settings,
        )
        with running_service(backend, max_batch_tokens=16) as service:
            with SyncScoringClient(service, retry_samples=False) as client:
                return client.score(list(samples))


def test_vllm_is_asked_for_raw_outputs_of_a_conversation_as_it_is():
    upstream = Upstream()
    (result,) = ask(upstream, {"messages": CHAT}, key=SecretStr("secret"))
    assert isinstance(result, RewardScored)
    assert result.score == 0.5 - 0.5 * 2.0 and result.labels == upstream.outputs
    assert result.tokens == 7
    ((path, body, authorization),) = upstream.requests
    assert (path, authorization) == ("/classify", "Bearer secret")
    assert body == {
        "model": "rm",
        "messages": CHAT,
        "use_activation": False,
        "add_generation_prompt": False,
        "add_special_tokens": False,
    }


def test_each_route_is_asked_in_its_form():
    for api, sample, expected in [
        ("classify", {"text": "a"}, {"input": "a"}),
        ("pooling", {"messages": CHAT}, {"messages": CHAT, "task": "classify"}),
        ("score", {"text": "a", "pair": "b"}, {"text_1": "a", "text_2": "b"}),
        ("predict", {"text": "a"}, {"inputs": "a", "raw_scores": True, "truncate": False}),
        ("predict", {"text": "a", "pair": "b"}, {"inputs": [["a", "b"]]}),
    ]:
        upstream = Upstream({"good": 0.5} if api == "score" else None)
        weights = {"good": 1.0} if api == "score" else LABELS
        (result,) = ask(upstream, sample, api=api, weights=weights)
        assert isinstance(result, RewardScored), (api, result)
        assert result.score == (0.5 if api == "score" else -0.5)
        path, body, _ = upstream.requests[0]
        assert path == f"/{api}" and body.items() >= expected.items()


class Tei:
    """`POST /predict` as the schema of Text Embeddings Inference has it, with a real classifier.

    Its labels come in the order of their values, and its errors have words and a type."""

    def __init__(self, folder: Path, labels: Sequence[str], limit: int = 1000) -> None:
        self.folder, self.labels, self.limit = folder, labels, limit
        self.app = FastAPI()
        self.app.post("/predict")(self.predict)

    async def predict(self, request: Request) -> Any:
        """Answer one input with a list, and a batch with a list of lists."""
        body = await request.json()
        if not body.keys() <= {"inputs", "raw_scores", "truncate"} or not body["raw_scores"]:
            return self._error(422, "Tokenizer", "unknown field")
        inputs = body["inputs"]
        if isinstance(inputs, str) or all(isinstance(part, str) for part in inputs):
            sequences = [[inputs] if isinstance(inputs, str) else inputs]
        else:
            sequences = inputs
        if sum(len(text) for sequence in sequences for text in sequence) > self.limit:
            words = f"Input validation error: `inputs` must have less than {self.limit} tokens. "
            return self._error(413, "Validation", words + "Given: 2000")
        rows = [self._predictions(*sequence) for sequence in sequences]
        return rows if sequences is inputs else rows[0]

    def _predictions(self, text: str, pair: str | None = None) -> list[dict[str, Any]]:
        values = reference(self.folder, text=text, pair=pair)
        rows = [{"score": v, "label": n} for n, v in zip(self.labels, values, strict=True)]
        return sorted(rows, key=lambda row: -row["score"])

    @staticmethod
    def _error(status: int, type: str, words: str) -> JSONResponse:
        return JSONResponse({"error": words, "error_type": type}, status)


@pytest.mark.parametrize("labels", [("LABEL_0",), ("bad", "good", "plain")])
def test_texts_and_pairs_at_tei_have_transformers_scores(tmp_path, labels):
    folder = make_reward_model(tmp_path, "deberta", labels=labels)
    weights = {name: 1.0 - index for index, name in enumerate(labels)}
    samples = [{"text": "Is it red?"}, {"text": "Is it red?", "pair": "It is."}, {"text": "집"}]
    *results, long = ask(
        Tei(folder, labels),
        *samples,
        {"text": "word " * 300},
        api="predict",
        weights=weights,
        prompt=("pair", BUILT_IN["pair"]),
    )
    for result, sample in zip(results, samples, strict=True):
        assert isinstance(result, RewardScored), result
        expected = reference(folder, text=sample["text"], pair=sample.get("pair"))
        assert list(result.labels) == list(labels)
        assert list(result.labels.values()) == pytest.approx(expected, abs=1e-6)
    assert isinstance(long, Failed) and long.error.type == "overlong"


def test_a_translation_is_asked_in_the_prompt_of_a_file():
    turns = (
        PromptTurn(role="user", content="{tgt_lang}: {src}"),
        PromptTurn(role="assistant", content="{mt}"),
    )
    upstream = Upstream()
    prompt = ("mt.yaml", ScoringPrompt(messages=turns, higher_is_better=False))
    ask(upstream, {"src": "a", "mt": "b", "tgt_lang": "ko"}, prompt=prompt)
    assert [turn["content"] for turn in upstream.requests[0][1]["messages"]] == ["ko: a", "b"]


def refused(status: int, message: str = "no", **headers: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status, headers)


def of_tei(status: int, message: str) -> JSONResponse:
    """Return an error as TEI writes those of its backend."""
    return JSONResponse({"error": f"Backend error: {message}", "error_type": "Backend"}, status)


@pytest.mark.parametrize(
    ("answers", "words", "retryable", "num_requests"),
    [
        ([refused(429)] * 3, "too many requests, HTTP 429", True, 3),
        ([refused(503)] * 3, "cannot be reached, HTTP 503", True, 3),
        ([refused(500)] * 3, "failed, HTTP 500", True, 3),
        ([of_tei(424, "Inference failed")] * 3, "failed, HTTP 424", True, 3),
        ([of_tei(424, "Model is not a classifier model")], "its model is no classifier", False, 1),
        ([refused(401)], "it refuses the API key", False, 1),
        ([refused(404, "The model `rm` does not exist.")], "it does not serve the model", False, 1),
        ([refused(404, "Not Found")], "it has no /classify for its model (HTTP 404)", False, 1),
        ([refused(501, "no such task")], "it has no /classify for its model", False, 1),
        ([refused(422)], "refused the request, HTTP 422", False, 1),
        ([{"model": "rm", "data": []}] * 3, "not a valid one", True, 3),
        ([JSONResponse([1, 2])] * 3, "not a valid one", True, 3),
    ],
)
def test_a_failure_of_the_upstream_is_that_of_a_sample(answers, words, retryable, num_requests):
    upstream = Upstream()
    upstream.answers = list(answers)
    (result,) = ask(upstream, {"text": "a"})
    assert isinstance(result, Failed) and result.error.type == "upstream"
    assert words in result.error.message and result.error.retryable == retryable
    assert "127.0.0.1" not in result.error.message and len(upstream.requests) == num_requests


def test_a_failure_that_passes_costs_no_score():
    upstream = Upstream()
    upstream.answers = [refused(429, **{"Retry-After": "0"}), refused(502)]
    (result,) = ask(upstream, {"text": "a"})
    assert isinstance(result, RewardScored) and len(upstream.requests) == 3
    upstream.answers = [of_tei(424, "Inference error: DriverError(CUDA_ERROR_OUT_OF_MEMORY)")]
    (result,) = ask(upstream, {"text": "b"}, api="predict")
    assert isinstance(result, RewardScored) and len(upstream.requests) == 5


def test_a_server_that_is_away_or_hangs_fails_samples():
    stopped = Upstream()
    (result,) = ask(stopped, {"text": "a"}, url=f"http://127.0.0.1:{free_port()}")
    assert isinstance(result, Failed) and "cannot be reached" in result.error.message
    assert result.error.retryable
    hanging = Upstream()
    hanging.is_hanging = True
    (result,) = ask(hanging, {"text": "a"}, request_timeout_s=0.2, max_attempts=2)
    assert isinstance(result, Failed) and "did not answer in time" in result.error.message
    assert result.error.retryable and len(hanging.requests) == 2


@pytest.mark.parametrize(
    ("status", "name"), [(401, "REWARD_MODEL_UPSTREAM_API_KEY"), (307, "--upstream")]
)
def test_the_log_names_the_setting_of_this_service_that_mends_a_refusal(status, name):
    upstream = Upstream()
    upstream.answers = [refused(status)]
    with capture_logs() as lines:
        (result,) = ask(upstream, {"text": "a"})
    (error,) = [line["error"] for line in lines if line["event"] == "upstream_failed"]
    assert name in error and "api_key_env" not in error and "base_url" not in error
    assert isinstance(result, Failed) and not result.error.retryable


def test_a_sample_beyond_the_upstreams_context_is_overlong():
    upstream = Upstream()
    message = "This model's maximum context length is 16 tokens. However, you requested 30 tokens"
    upstream.answers = [refused(400, message)]
    long, longer = ask(upstream, {"text": "a"}, {"text": "word " * 900}, max_input_length=1000)
    assert isinstance(long, Failed) and long.error.type == "overlong"
    assert (
        isinstance(longer, Failed)
        and "about 1126 tokens, the limit is 1000" in longer.error.message
    )


def test_another_model_and_another_order_of_labels_are_noticed():
    text = {"text": "a"}
    other_model = Upstream(model="another")
    reordered = Upstream({"bad": 2.0, "good": 0.5})
    fewer, renamed = Upstream({"good": 1.0}), Upstream({"LABEL_0": 1.0, "LABEL_1": 2.0})
    for upstream, api, words in [
        (other_model, "classify", "it runs another model"),
        (reordered, "classify", "its labels are not those"),
        (fewer, "classify", "its labels are not those"),
        (fewer, "pooling", "its labels are not those"),
        (renamed, "predict", "its labels are not those"),
    ]:
        (result,) = ask(upstream, text, api=api)
        assert isinstance(result, Failed) and words in result.error.message, (api, result)
        assert not result.error.retryable
    (result,) = ask(reordered, text, api="predict")  # which names each output
    assert isinstance(result, RewardScored) and result.labels == {"good": 0.5, "bad": 2.0}


def test_an_output_that_is_not_finite_is_no_score():
    upstream = Upstream({"good": 1e308, "bad": -1e308})
    (result,) = ask(upstream, {"text": "a"}, weights={"good": 10.0, "bad": -10.0})
    assert isinstance(result, Failed) and result.error.type == "non_finite"


@pytest.mark.parametrize(
    ("api", "answer"),
    [
        ("predict", JSONResponse({"error": "score is NaN", "error_type": "Backend"}, 424)),
        ("classify", refused(400, "Out of range float values are not JSON compliant")),  # vLLM 0.32
        ("classify", {"model": "rm", "data": [{"probs": [None, 1.0], "label": "good"}]}),
        ("pooling", {"model": "rm", "data": [{"data": [0.5, None]}]}),
    ],
)
def test_an_output_that_a_server_cannot_write_is_no_score(api, answer):
    upstream = Upstream()
    upstream.answers = [answer]
    (result,) = ask(upstream, {"text": "a"}, api=api)
    assert isinstance(result, Failed) and result.error.type == "non_finite", result
    assert not result.error.retryable and len(upstream.requests) == 1


def test_an_address_that_ends_in_v1_is_that_of_the_server():
    upstream = Upstream()
    with running_app(upstream.app) as url:
        (result,) = ask(upstream, {"text": "a"}, url=f"{url}/v1/")
    assert isinstance(result, RewardScored)


def test_a_form_that_a_route_does_not_take_is_refused_unasked():
    upstream = Upstream()
    pair, chat = {"text": "a", "pair": "b"}, {"messages": CHAT}
    (first,) = ask(upstream, pair)
    (second,) = ask(upstream, chat, api="predict", prompt=("pair", BUILT_IN["pair"]))
    assert isinstance(first, Failed) and "/classify takes messages or text" in first.error.message
    assert isinstance(second, Failed) and "/predict takes pair or text" in second.error.message
    assert not upstream.requests


def test_the_settings_name_the_server_and_no_password(monkeypatch):
    monkeypatch.setenv("REWARD_MODEL_UPSTREAM_API_KEY", "k")
    settings = RewardModelSettings(upstream="http://127.0.0.1:9", model="rm", weights="a=1,b=0")
    backend = make_backend(settings)
    assert isinstance(backend, UpstreamBackend) and settings.max_batch_tokens == 1
    description = backend.load()
    assert dict(description.weights) == {"a": 1.0, "b": 0.0} and description.prompt == "messages"
    with pytest.raises(UserError, match="REWARD_MODEL_UPSTREAM"):
        make_backend(RewardModelSettings(upstream="http://me:word@127.0.0.1:9", model="rm"))


@pytest.mark.parametrize("name", ["chat_template", "revision"])
def test_what_only_the_upstream_can_do_is_refused(name):
    settings = RewardModelSettings(upstream="http://127.0.0.1:9", model="rm", **{name: "a"})
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')}: with --upstream it is the"):
        make_backend(settings)
