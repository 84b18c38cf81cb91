"""A tiny role-play: a Qwen3 that reads bytes, turns of a few scenarios, and an embedding server
whose vectors are a function of the text."""

from __future__ import annotations

import json
import math
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

#: With markers around what the assistant writes, its end of turn among it.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>"
    "{% endgeneration %}\n{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DIMENSION = 64


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte, and those of ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<pad>", "<|im_start|>", "<|im_end|>", *alphabet]
    inner = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_policy(folder: Path, template: str = TEMPLATE) -> Path:
    """Write a Qwen3 of two layers with random weights."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    sizes = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.1,
    )
    model: Any = Qwen3ForCausalLM(sizes)
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


_PLACES = ("숲길", "바닷가", "시장", "도서관", "언덕", "부엌", "다리", "정원")
_THINGS = ("등불", "편지", "사과", "지도", "우산", "피리", "열쇠", "빵")


def turn(number: int, **changes: Any) -> dict[str, Any]:
    """Return a row. Four turns make a dialogue with its own scenario."""
    dialogue = number // 4
    location, object_name = _PLACES[dialogue % 8], _THINGS[(number * 3 + dialogue) % 8]
    row = {
        "id": f"t{number}",
        "prompt": [
            {"role": "system", "content": f"무대 {dialogue}: {location}. 하린은 존댓말을 쓴다."},
            {"role": "user", "content": f"{location}에서 {object_name} {number}개를 찾을까?"},
        ],
        "reference": f"하린이 {location}에서 {object_name}을 본다.\n"
        f'"네, {object_name} {number}개를 찾아요."',
        "player_name": "민수",
        "character_name": "하린",
        "speech_level": "polite",
        "scenario": f"s{dialogue}",
        "dialogue": f"d{dialogue}",
        "place": number % 4,
    }
    return row | changes


def write_turns(path: Path, numbers: Any) -> Path:
    """Write rows as JSON Lines."""
    rows = (number if isinstance(number, dict) else turn(number) for number in numbers)
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), "utf-8")
    return path


def vector_of(text: str) -> list[float]:
    """Return a normalized vector of hashed character trigrams."""
    counts = [0.0] * DIMENSION
    padded = f"  {text}  "
    for first in range(len(padded) - 2):
        counts[zlib.crc32(padded[first : first + 3].encode()) % DIMENSION] += 1.0
    length = math.sqrt(sum(count * count for count in counts))
    return [count / length for count in counts]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Return the one model."""
        if self.path == "/v1/models":
            self._answer(200, {"object": "list", "data": [{"id": "ngrams", "object": "model"}]})
        else:
            self._answer(404, {"error": {"message": "no such path"}})

    def do_POST(self) -> None:
        """Return vectors, unless the server refuses."""
        server: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if server.refuses():
            self._answer(401, {"error": {"message": "no such key", "type": "unauthorized"}})
            return
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        server.request_counts.update(texts)
        data = [
            {"object": "embedding", "index": index, "embedding": vector_of(text)}
            for index, text in enumerate(texts)
        ]
        usage = {"prompt_tokens": len(texts), "total_tokens": len(texts)}
        self._answer(200, {"object": "list", "model": "ngrams", "data": data, "usage": usage})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


class NgramServer(ThreadingHTTPServer):
    """An embedding server.

    refuses: whether it refuses a request for vectors.
    request_counts: how often it has embedded each text.
    """

    daemon_threads = True

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__((host, port), _Handler)
        self.refuses: Callable[[], bool] = lambda: False
        self.request_counts: Counter[str] = Counter()

    @property
    def url(self) -> str:
        """Return the server's root URL."""
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def ngram_server() -> Iterator[NgramServer]:
    """Start an embedding server in OpenAI's format, in a thread."""
    server = NgramServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
