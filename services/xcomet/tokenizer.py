"""Read the tokenizer of an encoder as it is stored.

transformers 5 rebuilds the tokenizers of XLM-R and DeBERTa from their vocabulary with different
rules. The rules of the checkpoint's training are in `tokenizer.json`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from scorekit.documents import parse_json
from scorekit.errors import UserError
from scorekit.server.tokenizers import deberta_tokenizer, read_unigram_file, xlm_roberta_tokenizer

_XLMR = {"bos": "<s>", "cls": "<s>", "eos": "</s>", "sep": "</s>"} | {
    name: f"<{name}>" for name in ("unk", "pad", "mask")
}
_DEBERTA = {"bos": "[CLS]", "eos": "[SEP]"} | {
    name: f"[{name.upper()}]" for name in ("cls", "sep", "unk", "pad", "mask")
}


def read_tokenizer(encoder_model: str, source: str, *, local: bool) -> Any:
    """Return the tokenizer of a folder or of a hub id, as transformers' `PreTrainedTokenizerFast`.

    Raises OSError if the hub has none, UserError if sentencepiece's file cannot be read.
    """
    from transformers import PreTrainedTokenizerFast

    file = _file(source, "tokenizer.json", local)
    deberta = encoder_model == "DeBERTa"
    if file is not None:
        inner = Tokenizer.from_file(str(file))
    else:
        inner = _of_pieces(source, deberta, local)
    marks = {f"{name}_token": mark for name, mark in (_DEBERTA if deberta else _XLMR).items()}
    settings = _file(source, "tokenizer_config.json", local)
    stored = {} if settings is None else dict(parse_json(settings.read_text(encoding="utf-8")))
    for name in marks:  # older folders on the hub name none
        mark = stored.get(name)
        mark = mark.get("content") if isinstance(mark, dict) else mark
        marks[name] = mark or marks[name]
    inner.no_padding()
    inner.no_truncation()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        clean_up_tokenization_spaces=bool(stored.get("clean_up_tokenization_spaces")),
        **marks,
    )


def _file(source: str, name: str, local: bool) -> Path | None:
    """Return a file of a folder or of a hub id; None if it does not exist. Raises OSError if the
    hub cannot be reached."""
    from transformers.utils.hub import cached_file

    path = cached_file(
        source, name, local_files_only=local, _raise_exceptions_for_missing_entries=False
    )
    return None if path is None else Path(path)


def _of_pieces(source: str, deberta: bool, local: bool) -> Tokenizer:
    """Return the tokenizer of sentencepiece's file."""
    file = _file(source, "spm.model" if deberta else "sentencepiece.bpe.model", local)
    if file is None:
        raise OSError(f"{source} has no tokenizer")
    make = deberta_tokenizer if deberta else xlm_roberta_tokenizer
    try:
        return make(read_unigram_file(file))
    except ValueError as error:
        raise UserError(f"{file}: {error}") from None
