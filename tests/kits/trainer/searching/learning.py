"""A searcher that acts from the start and can learn, and what its run needs.

These are an index of a few pages, questions, a generator that counts paid calls, and a judge by
rules.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from scorekit.server.settings import Secrets
from services.retriever.backends.bm25 import Bm25Builder
from services.retriever.index.ingest import ingest
from services.retriever.model import RetrieverBackend
from testing.judge import judge_app
from testing.openai_server import FakeOpenAI
from testing.servers import running_app, running_service, wait_ready
from tests.kits.retrieval.pdf import draw_pdf
from tests.kits.retrieval.stand_in import StandInRetriever
from tests.kits.trainer.searching.episodes import COMPLETE, crop, search

#: What the policy may write, each one token; it takes them with equal chances.
ACTIONS = (
    search("exports of steel"),
    search("imports of rice"),
    search("exports of rice"),
    crop(10, 10, 90, 90),
    COMPLETE,
)
_TRADE = [
    ["Exports of steel", "grew by 4.5 percent"],
    ["Imports of rice", "fell to 1,200 tons"],
    ["Exports of rice", "stood at 300 tons"],
]
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: The reference answer of every question.
RIGHT = "right"


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, and one per action."""
    special = ["<|pad|>", "<|im_end|>", "<|im_start|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: i for i, name in enumerate([*special, *alphabet])}
    bpe = Tokenizer(models.BPE(vocab, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(name, special=True) for name in special])
    bpe.add_tokens([AddedToken(text, normalized=False) for text in ACTIONS])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    wrapped.chat_template = _TEMPLATE
    return wrapped


def save_searcher(folder: Path) -> Path:
    """Write a policy of constructed weights: after an action it ends its turn, after all else it
    acts.

    The output of its layers is small, and depends on all that it reads.
    """
    tokens = tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokens),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=4096,
            initializer_range=0.05,
            bos_token_id=None,
            eos_token_id=tokens.eos_token_id,
            pad_token_id=tokens.pad_token_id,
            tie_word_embeddings=False,
        )
    )
    actions = tokens.convert_tokens_to_ids(list(ACTIONS))
    with torch.no_grad():
        read, output = model.model.embed_tokens.weight, model.lm_head.weight
        read[:, 0] += 1
        read[actions, 0] -= 1
        read[actions, 1] += 1
        output[actions, 0] += 3  # behind a norm: 4 times that above all others
        output[tokens.eos_token_id, 1] += 4
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)
    return folder


def write_questions(
    path: Path,
    numbers: range,
    groups: Sequence[int] = (),
    temperatures: Sequence[float | None] = (),
) -> Path:
    """Write questions about the deck's pages in turn.

    groups, temperatures: their `n_agent` and `temperature`, in turn; None, or none: the run's.
    """
    rows = [
        {
            "id": f"q{n}",
            "question": f"What is said under number {n}?",
            "reference_answer": RIGHT,
            "file_name": "trade.pdf",
            "reference_page": n % len(_TRADE) + 1,
        }
        | ({"n_agent": groups[n % len(groups)]} if groups else {})
        | ({"temperature": temperatures[n % len(temperatures)]} if temperatures else {})
        for n in numbers
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def answer(body: Mapping[str, Any], seed: int | None) -> str:
    """Return a right answer for half of all questions and images."""
    sent = json.dumps(body["messages"], sort_keys=True).encode()
    return RIGHT if hashlib.sha256(sent).digest()[0] % 2 else "wrong"


def make_index(folder: Path) -> Path:
    """Build an index of the deck."""
    (folder / "sources").mkdir()
    draw_pdf(folder / "sources/trade.pdf", _TRADE)
    ingest([folder / "sources"], folder / "index", [Bm25Builder("bigrams")], workers=1)
    return folder / "index"


def standing_in() -> StandInRetriever:
    """Return a retriever of the same pages that can be made to fail."""
    pages = {f"trade_{n}": " ".join(lines).lower() for n, lines in enumerate(_TRADE, 1)}
    return StandInRetriever(pages)


@contextmanager
def running_services(
    index: Any, generator: Any, judge: Any = None, secrets: Secrets | None = None
) -> Iterator[dict[str, Any]]:
    """Start the services of a run; yield the config sections that name them.

    index: a folder, or the app of a retriever.
    generator, judge: apps.
    secrets: the keys of a retriever of a folder.
    """
    with ExitStack() as stack:
        if isinstance(index, Path):
            served = running_service(RetrieverBackend(index), secrets)
        else:
            served = running_app(index)
        retriever = stack.enter_context(served)
        urls = [stack.enter_context(running_app(app)) for app in (generator, judge or judge_app())]
        wait_ready(urls[1])
        yield {
            "retriever": {"url": retriever},
            "answering": {
                "generator": {"base_url": f"{urls[0]}/v1", "model": "generator"},
                "judge": {"url": urls[1]},
                "money": {"generator": {"prompt": 1.0, "completion": 10.0}},
            },
        }


def counting() -> FakeOpenAI:
    """Return a generator that records its requests."""
    return FakeOpenAI("generator", respond=answer)


def config_of(folder: Path, services: Mapping[str, Any], **sections: Any) -> dict[str, Any]:
    """Return the config of a run of 6 updates of 3 questions with 4 episodes each.

    Batches are fixed, so that two runs can be compared bit by bit.

    A section's values override these. Policy and questions are written to `folder`.
    """
    if not (folder / "policy").exists():
        save_searcher(folder / "policy")
        write_questions(folder / "train.jsonl", range(9))
        write_questions(folder / "heldout.jsonl", range(9, 12))
    config: dict[str, Any] = {
        "task": "search",
        "data": {
            "train": str(folder / "train.jsonl"),
            "eval": str(folder / "heldout.jsonl"),
        },
        "policy": {"path": str(folder / "policy")},
        "generation": {"max_new_tokens": 4},
        "rollout": {"n_agent": 4, "deterministic": True},
        "episode": {
            "observation": "text",
            "instructions": "Search. {turns}",
            "max_turns": 3,
            "sight": {"min_pixels": 10_000, "max_pixels": 40_000, "legible_px": 1.0},
        },
        "reward": {"preset": "unified", "forced_completion": "score"},
        "rl": {
            "num_updates": 6,
            "batch_size": 3,
            "minibatch_size": 4,
            "lr": 1e-2,
            "warmup_updates": 3,
        },
        "eval": {"eval_every_n_updates": 2},
        "misc": {
            "threads": 1,
            "device": "cpu",
            "run_dir": str(folder / "run"),
            "save_every_n_updates": 2,
        },
    }
    config |= services
    for name, values in sections.items():
        config[name] = config.get(name, {}) | values
    return config


def write_config(path: Path, config: Mapping[str, Any]) -> Path:
    """Write a config as YAML."""
    path.write_text(yaml.safe_dump(dict(config)), encoding="utf-8")
    return path
