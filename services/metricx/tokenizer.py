"""The tokenizer of a folder: ids equal upstream's, whichever version of transformers is here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scorekit.errors import UserError
from scorekit.server.unigram import read_pieces, t5_tokenizer

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

#: How many `<extra_id_N>` stand behind the pieces where no tokenizer_config.json says it.
_EXTRA_IDS = 100


def load_tokenizer(folder: Path, name: str) -> Tokenizer:
    """Return the tokenizer of a folder: of `spiece.model`, else of `tokenizer.json`.

    A tokenizer.json beside spiece.model is not used: each version of transformers writes rules of
    its own into it. name: what the user calls the folder. Raises UserError where the files make no
    tokenizer, or the two files have other pieces.
    """
    try:
        return _load(folder)
    except Exception as error:  # tokenizers raises nothing narrower
        reason = (str(error) or type(error).__name__).split("\n")[0]
        raise UserError(f"--tokenizer {name}: cannot be read: {reason}") from None


def _load(folder: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    settings = _settings(folder)
    special = _special_tokens(settings)
    file, stored = folder / "spiece.model", folder / "tokenizer.json"
    if file.is_file():
        tokenizer = t5_tokenizer(read_pieces(file), settings.get("extra_ids", _EXTRA_IDS), special)
        if stored.is_file() and Tokenizer.from_file(str(stored)).get_vocab() != tokenizer.get_vocab():
            raise ValueError(
                "spiece.model and tokenizer.json have other pieces; remove the one that is not the "
                "model's"
            )
    elif stored.is_file():
        tokenizer = Tokenizer.from_file(str(stored))
        written = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        tokenizer.add_special_tokens([token for token in special if token.content not in written])
    else:
        raise ValueError(f"{folder} has neither spiece.model nor tokenizer.json")
    _check_added(folder, tokenizer)
    return tokenizer


def _settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, with what special_tokens_map.json says in the place of its entries."""
    found: dict[str, Any] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = folder / name
        content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if not isinstance(content, dict):
            raise ValueError(f"{name} is no object of JSON")
        found |= content
    return found


def _special_tokens(settings: dict[str, Any]) -> list[AddedToken]:
    """Tokens that are ids of their own wherever they stand in a text."""
    defaults = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    tokens = [settings.get(key) or default for key, default in defaults.items()]
    more = settings.get("additional_special_tokens")
    if more is None:
        more = [f"<extra_id_{n}>" for n in range(settings.get("extra_ids", _EXTRA_IDS))]
    return [_added_token(token) for token in (*tokens, *more)]


def _added_token(token: str | dict[str, Any]) -> AddedToken:
    from tokenizers import AddedToken

    fields = {"content": token} if isinstance(token, str) else token
    flags = {k: fields.get(k, False) for k in ("lstrip", "rstrip", "single_word", "normalized")}
    return AddedToken(fields["content"], special=True, **flags)


def _check_added(folder: Path, tokenizer: Tokenizer) -> None:
    """Refuse tokens with ids of their own that the other files do not have."""
    file = folder / "added_tokens.json"
    added = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for token, id in added.items():
        if tokenizer.token_to_id(token) != id:
            raise ValueError(f"added_tokens.json has {token}, no piece with the id {id}")
