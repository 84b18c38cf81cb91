"""Load a folder's tokenizer with upstream's ids, whatever version of transformers is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from scorekit.documents import parse_json
from scorekit.errors import UserError
from scorekit.server.tokenizers import read_unigram_file, t5_tokenizer

_MAX_EXTRA_IDS = 10_000


def load_tokenizer(folder: Path, name: str) -> Tokenizer:
    """Return the tokenizer of a folder, from `spiece.model` or else `tokenizer.json`.

    A tokenizer.json next to spiece.model is not used, because each version of transformers writes
    different rules into it. name: the user's name of the folder. Raises UserError if the files are
    invalid, or if the two files have different pieces.
    """
    try:
        return _load(folder)
    except Exception as error:  # tokenizers raises nothing narrower
        reason = (str(error) or type(error).__name__).split("\n")[0]
        raise UserError(f"--tokenizer {name}: cannot be read: {reason}") from None


def _load(folder: Path) -> Tokenizer:
    settings = _settings(folder)
    special = _special_tokens(settings)
    file, stored = folder / "spiece.model", folder / "tokenizer.json"
    if file.is_file():
        tokenizer = t5_tokenizer(read_unigram_file(file), settings["extra_ids"], special)
        vocabulary = tokenizer.get_vocab()
        if stored.is_file() and Tokenizer.from_file(str(stored)).get_vocab() != vocabulary:
            raise ValueError(
                "spiece.model, with extra_ids of tokenizer_config.json, and tokenizer.json have "
                "other pieces; remove the file that is not the model's"
            )
    elif stored.is_file():
        tokenizer = Tokenizer.from_file(str(stored))
        written = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        tokenizer.add_special_tokens([token for token in special if token.content not in written])
    else:
        raise ValueError(f"{folder} has neither spiece.model nor tokenizer.json")
    for token, id in _json(folder / "added_tokens.json").items():
        if tokenizer.token_to_id(token) != id:
            raise ValueError(f"added_tokens.json has {token}, no piece with the id {id}")
    return tokenizer


def _settings(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json, overridden by special_tokens_map.json."""
    settings = _json(folder / "tokenizer_config.json") | _json(folder / "special_tokens_map.json")
    # As in google/mt5's folders: mT5 has these pieces in its file; T5 adds a hundred after it.
    count = settings.setdefault("extra_ids", 0)
    if not isinstance(count, int) or not 0 <= count <= _MAX_EXTRA_IDS:
        raise ValueError(f"tokenizer_config.json: extra_ids is {count!r}, no number")
    return settings


def _special_tokens(settings: dict[str, Any]) -> list[AddedToken]:
    """Return the tokens that always have one id, anywhere in a text."""
    defaults = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    tokens = [_added_token(key, settings.get(key) or text) for key, text in defaults.items()]
    more = settings.get("additional_special_tokens")
    if more is None:
        more = [f"<extra_id_{n}>" for n in range(settings["extra_ids"])]
    return tokens + [_added_token("additional_special_tokens", token) for token in more]


def _added_token(key: str, token: Any) -> AddedToken:
    fields = token if isinstance(token, dict) else {"content": token}
    if not isinstance(fields.get("content"), str):
        raise ValueError(f"tokenizer_config.json or special_tokens_map.json: {key} is no token")
    flags = {k: bool(fields.get(k)) for k in ("lstrip", "rstrip", "single_word", "normalized")}
    return AddedToken(fields["content"], special=True, **flags)


def _json(file: Path) -> dict[str, Any]:
    """Return a file's JSON object; an empty one if the file does not exist."""
    if not file.is_file():
        return {}
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file.name}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file.name}: expected a JSON object")
    return content
