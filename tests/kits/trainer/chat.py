"""Real chat templates, as TRL keeps them, on byte-level tokenizers with their special tokens."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_FOLDER = Path(trl.__file__).parent / "chat_templates"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}\n"
)
#: Template -> the token that ends its turns.
ENDS = {
    "chatml": "<|im_end|>",
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3_instruct_2507": "<|im_end|>",
    "gemma3": "<end_of_turn>",
    "llama3": "<|eot_id|>",
}
_SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<bos>",
)


@cache
def template_text(name: str) -> str:
    """Return a template of TRL's package; `chatml`: the plain form."""
    return CHATML if name == "chatml" else (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def byte_tokenizer(template: str | None = None, end: str = "<|im_end|>") -> Any:
    """Return a tokenizer with one token per byte, as GPT-2 writes them.

    end: eos_token.

    Every Korean character is three tokens.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE({letter: number for number, letter in enumerate(letters)}, [])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token=end,
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = template
    return wrapped


def chat_tokenizer(name: str) -> Any:
    """Return a tokenizer with a template of `ENDS`."""
    return byte_tokenizer(template_text(name), ENDS[name])


def turns(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    """Return a conversation: user and assistant by turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return [*([] if system is None else [{"role": "system", "content": system}]), *messages]
