"""`python -m demo.llm_server`: the demo's policy as an OpenAI-compatible chat server.

It replaces vLLM where there is none. It has /v1/models and /v1/chat/completions with n, seed,
temperature 0 as greedy, top_p, max_tokens, stop, finish_reason and token counts. Choice i has seed
+ i, whatever else is sampled in the same batch. Errors have vLLM's texts. Other machines reach it
only if --host allows it and there is a key. The policy can only translate English user-interface
strings to Korean: its chat template takes the text of the last user turn as the source and drops a
system turn.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field

from demo.llm_sampling import Completion, Sampler, Wanted
from demo.openai_form import LOOPBACK, Refused, check_host, check_key, new_app
from scorekit.command import clean_exit

MODEL = Path(__file__).parent / "models/policy"
NAME = "demo-policy"


class Message(BaseModel):
    """Holds one turn."""

    role: Literal["system", "user", "assistant"]
    content: str


class ChatRequest(BaseModel):
    """Holds the body of a /v1/chat/completions request.

    Unsupported options are rejected, not ignored: the fields below the line may only have the
    value that changes nothing.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    messages: list[Message] = Field(min_length=1)
    n: int = Field(1, ge=1, le=256)
    seed: int | None = Field(None, ge=0)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    stop: str | list[str] | None = None
    # --- not implemented ---
    stream: Literal[False] = False
    top_k: Literal[0, -1] = 0
    min_p: Annotated[float, Field(ge=0, le=0)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=1, le=1)] = 1.0
    presence_penalty: Annotated[float, Field(ge=0, le=0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] = 0.0


def create_app(sampler: Sampler, *, name: str = NAME, api_key: str | None = None) -> FastAPI:
    """Return the ASGI app over a sampler.

    api_key: None allows every client.
    """
    app = new_app()

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        check_key(request, api_key)
        description = {"id": name, "object": "model", "max_model_len": sampler.context_length}
        return {"object": "list", "data": [description]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> dict[str, Any]:
        check_key(request, api_key)
        if body.model != name:
            raise Refused(404, f"The model `{body.model}` does not exist.")
        if body.n > 1 and body.temperature == 0:
            raise Refused(400, "n must be 1 when using greedy sampling.")
        requests = _sequences(body, sampler)
        futures = [
            asyncio.wrap_future(sampler.submit(sampling_request)) for sampling_request in requests
        ]
        completions = await asyncio.gather(*futures)
        return _answer(name, len(requests[0].prompt), completions)

    return app


def _sequences(body: ChatRequest, sampler: Sampler) -> list[Wanted]:
    """Return one sequence per choice. Raise Refused if the prompt does not fit the model's
    positions.
    """
    text = sampler.tokenizer.apply_chat_template(
        [message.model_dump() for message in body.messages],
        tokenize=False,
        add_generation_prompt=True,
    )
    prompt = tuple(sampler.tokenizer(text, add_special_tokens=False)["input_ids"])
    if not prompt:
        raise Refused(400, "messages: the prompt is empty (no user turn?)")
    max_new_tokens = sampler.context_length - len(prompt)
    num_tokens = max_new_tokens if body.max_tokens is None else body.max_tokens
    if num_tokens > max_new_tokens or num_tokens < 1:
        raise Refused(
            400,
            f"This model's maximum context length is {sampler.context_length} tokens. However, you "
            f"requested {body.max_tokens} output tokens and your prompt contains {len(prompt)}.",
        )
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    seeds = [None if body.seed is None else body.seed + i for i in range(body.n)]
    return [Wanted(prompt, num_tokens, body.temperature, body.top_p, seed, stop) for seed in seeds]


def _answer(name: str, prompt_tokens: int, completions: list[Completion]) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": completion.text},
            "finish_reason": completion.finish_reason,
        }
        for index, completion in enumerate(completions)
    ]
    tokens = sum(completion.tokens for completion in completions)
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": name,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": prompt_tokens + tokens,
        },
    }


def load_sampler(folder: Path, threads: int) -> Sampler:
    """Load the policy in a folder, on the CPU."""
    import torch

    from trainer.rl.config import PolicyConfig
    from trainer.rl.policy import load_policy, pad_token_id, stop_token_ids

    torch.set_num_threads(threads)
    model, tokenizer = load_policy(PolicyConfig(path=str(folder)), torch.device("cpu"))
    stop_ids, pad_id = stop_token_ids(model, tokenizer), pad_token_id(model, tokenizer)
    return Sampler(model, tokenizer, stop_ids, pad_id)


def main(
    host: Annotated[str, typer.Option(help="Address; any but this one needs a key.")] = LOOPBACK,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    model: Annotated[Path, typer.Option(help="Folder of a small causal LM.")] = MODEL,
    served_model_name: Annotated[str, typer.Option(help="Its name in requests.")] = NAME,
    api_key: Annotated[
        str | None, typer.Option(envvar="VLLM_API_KEY", help="Key that clients must send.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the model.")] = 1,
) -> None:
    """Serve a small model in OpenAI's chat form."""
    import uvicorn

    with clean_exit(stdout="log"):
        check_host(host, api_key, "VLLM_API_KEY")
        app = create_app(load_sampler(model, threads), name=served_model_name, api_key=api_key)
        uvicorn.run(app, host=host, port=port, log_level="warning")


if __name__ == "__main__":
    typer.run(main)
