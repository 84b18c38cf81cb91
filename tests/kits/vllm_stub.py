"""A server with vLLM's HTTP API that samples from a tiny Llama or a model that reads images."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from peft import PeftModel
from PIL import Image
from torch import nn
from transformers import AutoConfig, LlamaForCausalLM, Qwen2_5_VLForConditionalGeneration

from testing.servers import PATIENCE_S

NAME, KEY, CONTEXT = "tiny", "key-of-the-stub", 64


_LOADING = threading.Lock()
_LOADED: dict[tuple[Path, int, int], nn.Module] = {}


class VLLMStub:
    """A fake vLLM server.

    policy: the folder it serves.
    mode: of its log-probabilities.
    routes: those that take weights ("lora", "dev"), images ("images"), or ids alone, with labels
    ("ids").
    processor: what makes patches of images.
    failures: statuses of the next completions in turn; 0 cuts the answer.
    blocked_prompts: first ids of prompts that wait for `release`, before their token number
    `blocked_token`.
    entered: how many have waited there.
    bodies: the requests for completions.
    is_hanging: requests get no answer.
    refuses_weights: the status of all requests that load some, if any.
    mid_reload: called when weights are loaded, and not labelled.
    spoil: changes each answer with completions before it is sent.
    aborts: how often requests in flight were aborted.
    """

    def __init__(
        self,
        policy: Path,
        *,
        mode: str = "processed_logprobs",
        routes: Sequence[str] = ("lora", "dev"),
        processor: Any = None,
    ) -> None:
        self.policy, self.mode, self.processor = policy, mode, processor
        self.failures: list[int] = []
        self.blocked_prompts: set[int] = set()
        self.blocked_token = 0
        self.entered = 0
        self.release = threading.Event()
        self.is_hanging = False
        self.refuses_weights: int | None = None
        self.mid_reload: Callable[[], None] = lambda: None
        self.spoil: Callable[[dict[str, Any]], Any] = lambda answer: answer
        self.aborts = 0
        self.bodies: list[dict[str, Any]] = []
        self.calls: Counter[str] = Counter()
        self.life = 0  # the number of starts
        self._changing = threading.Lock()  # a request sees a server before its restart, or after
        self.restart()
        self.app = FastAPI()
        self.app.middleware("http")(self._guard)
        self.app.get("/v1/models")(self.models)
        self.app.post("/v1/completions")(self.completions)
        if "images" in routes or "ids" in routes:
            self.app.post("/inference/v1/generate")(self.generate)
        if "lora" in routes:
            self.app.post("/v1/load_lora_adapter")(self.load_adapter)
            self.app.post("/v1/unload_lora_adapter")(self.unload_adapter)
        if "dev" in routes:
            self.app.get("/weight_info")(lambda: {"weight_version": self.version})
            self.app.post("/update_weight_version")(self.name_version)
            self.app.post("/collective_rpc")(self.reload)
            self.app.post("/reset_{cache}_cache")(self.reset)
            self.app.get("/is_paused")(lambda: {"is_paused": self.is_paused})
            self.app.post("/pause")(self.pause)
            self.app.post("/resume")(self.resume)

    def restart(self, *failures: int) -> None:
        """Drop everything but the model that it was started with, and add these `failures`."""
        model = _load(self.policy)
        with self._changing:
            self.is_dead = self.is_paused = False
            self.life += 1
            self.model: nn.Module = model
            self.adapters: dict[str, nn.Module] = {}
            self.version = "default"
            self.half_forgotten: set[str] = set()
            self.failures += failures

    def kill(self) -> None:
        """Cut all answers, also those to requests in flight, until it is restarted."""
        self.is_dead = True

    async def _guard(self, request: Request, call_next: Any) -> Response:
        path = request.url.path
        self.calls[path] += 1
        while self.is_hanging and not self.is_dead:
            await asyncio.sleep(0.01)
        if self.is_dead:
            return _cut()
        if path.startswith("/v1") and request.headers.get("authorization") != f"Bearer {KEY}":
            return _refusal(401, "Unauthorized")
        life = self.life
        answer = await call_next(request)
        return _cut() if self.is_dead or self.life != life else answer

    def pause(self, mode: str = "abort") -> dict[str, str]:
        """Let requests stand still; with `abort` those in flight end with what they have."""
        with self._changing:
            self.is_paused = True
            self.aborts += mode == "abort"
        return {"status": "paused"}

    def resume(self) -> dict[str, str]:
        self.is_paused = False
        return {"status": "resumed"}

    def models(self) -> dict[str, Any]:
        adapters = [{"id": name, "parent": NAME} for name in self.adapters]
        return {"data": [{"id": NAME, "parent": None}, *adapters]}

    def load_adapter(self, body: dict[str, Any]) -> Response:
        if not {"lora_name", "lora_path"} <= body.keys():
            return _refusal(400, "a field is missing")
        if self.refuses_weights is not None:
            return _refusal(self.refuses_weights, "no weights now")
        if body["lora_name"] in self.adapters:
            return _refusal(400, "the adapter has already been loaded")
        if not Path(body["lora_path"]).is_dir():
            return _refusal(404, f"No adapter found for {body['lora_path']}")
        adapted = PeftModel.from_pretrained(_load_anew(self.policy), body["lora_path"])
        self.adapters[body["lora_name"]] = adapted.eval()
        return Response("Success")

    def unload_adapter(self, body: dict[str, Any]) -> Response:
        was_loaded = self.adapters.pop(body["lora_name"], None) is not None
        return Response("Success") if was_loaded else _refusal(404, "no such adapter")

    def reload(self, body: dict[str, Any]) -> Response:
        assert body["method"] == "reload_weights"
        if self.refuses_weights is not None:
            return _refusal(self.refuses_weights, "no weights now")
        self.model = _load(Path(body["kwargs"]["weights_path"]))
        self.mid_reload()
        self.half_forgotten = {"mm", "encoder"}  # by the workers, not by the scheduler
        return JSONResponse({"results": [None]})

    def reset(self, cache: str) -> Response:
        self.half_forgotten.discard(cache)
        return Response()

    def name_version(self, body: dict[str, Any]) -> dict[str, bool]:
        self.version = body["new_version"]
        return {"success": True}

    def completions(self, body: dict[str, Any]) -> Response:
        self.bodies.append(body)
        self._block(body["prompt"], 0)
        with self._changing:
            status = self.failures.pop(0) if self.failures else None
            adapter = self.adapters.get(body["model"])
        if status is not None:
            return _refusal(status, "not now") if status else _cut()
        if body["model"] != NAME and adapter is None:
            return _refusal(404, f"The model `{body['model']}` does not exist.")
        if len(body["prompt"]) + body["max_tokens"] > CONTEXT:
            return _refusal(400, f"This model's maximum context length is {CONTEXT} tokens.")
        choices = [self._choice(adapter, body, index) for index in range(body.get("n", 1))]
        for choice in choices:
            del choice["weight_versions"]
            choice["prompt_token_ids"] = body["prompt"]
        return self._answer(body["model"], body["prompt"], choices)

    def generate(self, body: dict[str, Any]) -> Response:
        """Answer with ids: one for each image becomes as many as the image has in the model."""
        if not {"token_ids", "sampling_params"} <= body.keys():
            return _refusal(422, "a field is missing")
        if self.half_forgotten:
            return _refusal(500, "Encoder cache miss")  # after which vLLM 0.32 is gone
        self.bodies.append(body)
        self._block(body["token_ids"], 0)
        with self._changing:
            status = self.failures.pop(0) if self.failures else None
            model: Any = self.model
            adapter = self.adapters.get(body["model"])
        if status is not None:
            return _refusal(status, "not now") if status else _cut()
        images = [_decode_image(part["url"]) for part in body.get("content_parts", ())]
        image_inputs = dict(self.processor(images=images, return_tensors="pt")) if images else {}
        left = [int(grid.prod()) // 4 for grid in image_inputs.get("image_grid_thw", ())]
        image = getattr(model.config, "image_token_id", None)
        ids: list[int] = []
        for token_id in body["token_ids"]:
            ids += [image] * left.pop(0) if left and token_id == image else [token_id]
        sampling = {"n": 1, "top_k": 0, "logprobs": None, **body["sampling_params"], "prompt": ids}
        choices = [
            self._choice(adapter, sampling, index, image_inputs) for index in range(sampling["n"])
        ]
        for choice in choices:
            if logprobs := choice["logprobs"]:
                pairs = zip(choice["token_ids"], logprobs["token_logprobs"], strict=True)
                content = [{"token_id": token_id, "logprob": value} for token_id, value in pairs]
                choice["logprobs"] = {"content": content}
        return self._answer(body["model"], ids, choices, prompt_token_ids=ids)

    def _answer(
        self, model: str, prompt: list[int], choices: list[dict[str, Any]], **fields: Any
    ) -> Response:
        num_sampled = sum(len(choice["token_ids"]) for choice in choices)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": num_sampled}
        answer = {"model": model, "choices": choices, "usage": usage, **fields}
        # As vLLM writes it, NaN and all: JSONResponse would refuse some of what `spoil` returns.
        return Response(json.dumps(self.spoil(answer)), media_type="application/json")

    @torch.no_grad()
    def _choice(
        self, adapter: Any, body: dict[str, Any], index: int, images: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return one completion: a function of weights, prompt, images, settings, seed, index.

        adapter: the model with the adapter; None: the model with the weights of each moment.
        """
        generator = torch.Generator().manual_seed(body["seed"] + index)
        ids: list[int] = []
        logprobs: list[float] = []
        labels: list[str] = []
        aborts, finish_reason = self.aborts, "length"
        while len(ids) < body["max_tokens"] and not self.is_dead:
            if ids:
                self._block(body["prompt"], len(ids))
            while self.is_paused and not self.is_dead and self.aborts == aborts:
                time.sleep(0.005)
            if self.aborts != aborts:
                finish_reason = "abort"
                break
            with self._changing:
                if self.is_paused:
                    continue
                model: Any = self.model if adapter is None else adapter
                labels.append(self.version)
            so_far = torch.tensor([[*body["prompt"], *ids]])
            inputs = dict(images or {})
            if images and "mm_token_type_ids" in signature(type(model).forward).parameters:
                inputs["mm_token_type_ids"] = (so_far == model.config.image_token_id).long()
            logits = model(so_far, **inputs).logits[0, -1].double()
            for token_id, bias in body.get("logit_bias", {}).items():
                logits[int(token_id)] += bias
            scaled = logits / (body["temperature"] or 1e-9)
            if body["top_k"] > 0:
                scaled[scaled < scaled.topk(body["top_k"]).values[-1]] = -torch.inf
            ids.append(int(torch.multinomial(scaled.softmax(-1), 1, generator=generator)))
            returned_logits = scaled if self.mode == "processed_logprobs" else logits
            logprobs.append(float(returned_logits.log_softmax(-1)[ids[-1]]))
            if ids[-1] in body.get("stop_token_ids", ()):
                finish_reason = "stop"
                break
        logprobs_field = {"token_logprobs": logprobs} if body["logprobs"] is not None else None
        spans: list[dict[str, Any]] = []
        for number, label in enumerate(labels):
            if not spans or spans[-1]["version"] != label:
                spans.append({"version": label, "start": number, "end": number})
            spans[-1]["end"] += 1
        choice = {"index": index, "token_ids": ids, "logprobs": logprobs_field}
        choice["finish_reason"] = finish_reason
        return choice | {"weight_versions": spans}

    def _block(self, prompt: Sequence[int], token: int) -> None:
        """Wait for `release` before this token, if the test blocks this prompt there."""
        if prompt[0] in self.blocked_prompts and token == self.blocked_token:
            self.entered += 1
            self.release.wait(PATIENCE_S)


def _load(folder: Path) -> nn.Module:
    """Return the model of a folder, which all servers share: nobody changes it."""
    file = (folder / "config.json").stat()
    key = (folder, file.st_ino, file.st_mtime_ns)
    with _LOADING:
        if key not in _LOADED:
            if len(_LOADED) > 7:
                del _LOADED[next(iter(_LOADED))]
            _LOADED[key] = _load_alone(folder)
        return _LOADED[key]


def _load_anew(folder: Path) -> nn.Module:
    # transformers patches modules of torch while it loads, so one load at a time
    with _LOADING:
        return _load_alone(folder)


def _load_alone(folder: Path) -> nn.Module:
    sees = AutoConfig.from_pretrained(folder).model_type == "qwen2_5_vl"
    kind: Any = Qwen2_5_VLForConditionalGeneration if sees else LlamaForCausalLM
    model: nn.Module = kind.from_pretrained(folder).eval()
    return model


def _decode_image(url: str) -> Image.Image:
    kind, _, data = url.partition(",")
    assert kind == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(data)))


def _cut() -> Response:
    """Return an answer that ends too early."""
    return StreamingResponse(iter([b"{"]), headers={"content-length": "1000"})


def _refusal(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)
