"""The MetricX-24 hybrid backend: input format, tokenization, scores.

A folder's tokenizer is loaded with upstream's ids, whatever version of transformers is installed.
Source: google-research/metricx (metricx24/predict.py, metricx24/models.py), Juraska et al. 2024,
"MetricX-24: The Google Submission to the WMT 2024 Metrics Shared Task" (arXiv 2410.03983).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from tokenizers import AddedToken, Tokenizer

from scorekit.digest import digest_files
from scorekit.documents import parse_json
from scorekit.errors import SampleError, UserError
from scorekit.hub import (
    METRICX_FILES,
    METRICX_TOKENIZER,
    T5_TOKENIZER_FILES,
    fetch_model,
    looks_local,
    public_name,
)
from scorekit.schemas import MetricXOptions, ScoreRange, TranslationSample
from scorekit.server.backend import (
    Encoded,
    Outcome,
    installed_versions,
    translation_probe,
)
from scorekit.server.checkpoint_backend import CheckpointBackend, ModelOptions
from scorekit.server.local import LocalScorer
from scorekit.server.score_endpoint import ScoreDescription, ScoreEndpoint
from scorekit.server.tokenizers import BoundedTokenizer, read_unigram_file, t5_tokenizer

if TYPE_CHECKING:
    from services.metricx.regression import MT5ForRegression


#: Upstream's limit, which includes the end-of-sentence id that is dropped afterwards.
MAX_INPUT_LENGTH = 1536
_MAX_EXTRA_IDS = 10_000
_FP16 = "T5's activations overflow float16 and give scores that are not finite; use bfloat16"


def format_input(sample: TranslationSample) -> str:
    """Return the model's input: `source: ... candidate: ...[ reference: ...]`.

    Without a reference that part is left out, as in upstream's predict.py: an empty ` reference: `
    is a different input with a very different score.
    """
    text = f"source: {sample.src} candidate: {sample.mt}"
    return text if sample.ref is None else f"{text} reference: {sample.ref}"


class MetricXBackend(CheckpointBackend):
    """MetricX from a local folder or a hub id.

    model, tokenizer: local folder or hub id.
    options: of them dtype is float32 or bfloat16.
    """

    service = "metricx"
    endpoint = ScoreEndpoint(TranslationSample, MetricXOptions)

    def __init__(
        self, model: str, tokenizer: str | None = None, **options: Unpack[ModelOptions]
    ) -> None:
        super().__init__(model, **options)
        self._tokenizer_name = tokenizer
        self._model: MT5ForRegression
        self._tokenizer: BoundedTokenizer

    def check(self) -> None:
        """Raise UserError if the settings cannot work. Loads nothing."""
        if self._dtype_name == "float16":
            raise UserError(f"--dtype float16: {_FP16}")
        super().check()
        if looks_local(self._model_name):
            check_folder(fetch_model(self._model_name, None, [], "--model"))
        if self._tokenizer_name and looks_local(self._tokenizer_name):
            fetch_model(self._tokenizer_name, None, [], "--tokenizer")

    def load(self) -> ScoreDescription:
        """Load tokenizer and weights. Raises UserError if the files are not a MetricX model."""
        self.check()
        import torch

        from services.metricx.regression import load_regression

        device = self._prepare_device()
        folder = fetch_model(self._model_name, self._revision, METRICX_FILES, "--model")
        check_folder(folder)
        tokenizer_name, tokenizer_folder = self._find_tokenizer(folder)
        tokenizer = load_tokenizer(tokenizer_folder, tokenizer_name)
        self._tokenizer = BoundedTokenizer(tokenizer, closing=1)
        self._model = load_regression(folder, getattr(torch, self._dtype_name), device)
        ids, rows = tokenizer.get_vocab_size(), self._model.shared.num_embeddings
        if ids > rows:  # an id without a row crashes the process on a GPU
            raise UserError(
                f"--tokenizer {tokenizer_name}: it has {ids} ids, but the weights of {folder} have "
                f"{rows} rows. Use the model's own tokenizer"
            )
        self._pack(self._model)
        return ScoreDescription(
            model=public_name(self._model_name),
            revision=_revision(folder, self._model_name),
            tokenizer=public_name(tokenizer_name),
            dtype=self._dtype_name,
            device=str(device),
            matmul=self._matmul,
            max_input_length=MAX_INPUT_LENGTH,
            score_range=ScoreRange(min=0.0, max=25.0),
            higher_is_better=False,
            inputs={"src": "required", "mt": "required", "ref": "optional"},
            versions=installed_versions("torch", "transformers", "tokenizers"),
            engine={"attention": "eager", "tokenizer_digest": _tokenizer_digest(tokenizer_folder)},
        )

    def encode(
        self, samples: Sequence[TranslationSample], options: Any
    ) -> list[Encoded | SampleError]:
        """Tokenize, drop the end-of-sentence id and cut at the limit, as upstream does."""
        max_tokens = min(options.max_input_length or MAX_INPUT_LENGTH, MAX_INPUT_LENGTH) - 1
        refuses = options.overlong == "error"
        tokenized_texts = self._tokenizer.read(
            [format_input(s) for s in samples], max_tokens, count=refuses
        )
        encoded: list[Encoded | SampleError] = []
        for sample, tokenized in zip(samples, tokenized_texts, strict=True):
            if isinstance(tokenized, Exception):
                raise tokenized
            if refuses and tokenized.is_cut:
                message = f"{tokenized.total + 1} tokens, the limit is {max_tokens + 1}"
                encoded.append(SampleError("overlong", message))
                continue
            fields = _input_fields(sample, len(tokenized.ids), tokenized.covered)
            encoded.append(Encoded(len(tokenized.ids), fields, tokenized.ids))
        return encoded

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        """Return scores 0..25; NaN if the model's output is not finite."""
        import torch

        longest = max(e.length for e in batch)
        pad = [e.payload + [0] * (longest - e.length) for e in batch]
        mask = [[1] * e.length + [0] * (longest - e.length) for e in batch]
        with torch.inference_mode():
            raw = self._model(  # [B]
                torch.tensor(pad, device=self._device), torch.tensor(mask, device=self._device)
            ).tolist()
        # Clamping would turn an infinity into a perfect or a worst score.
        scores = [min(25.0, max(0.0, s)) if math.isfinite(s) else math.nan for s in raw]
        return [{"score": score} for score in scores]

    def probe(self, words: int) -> TranslationSample:
        """Return a translation of about `words` words on each side."""
        return translation_probe(words)

    def _find_tokenizer(self, model_folder: Path) -> tuple[str, Path]:
        name = self._tokenizer_name
        if name is None:
            if any((model_folder / file).exists() for file in ("tokenizer.json", "spiece.model")):
                return self._model_name, model_folder
            name = METRICX_TOKENIZER
        return name, fetch_model(name, None, T5_TOKENIZER_FILES, "--tokenizer")


class MetricXQEScorer(LocalScorer):
    """MetricX in the caller's process, with the scorer protocol.

    As in the service, a sample with a reference is scored with it, else without (QE).
    device, dtype, threads, matmul: see `ModelOptions`.
    max_batch_tokens: see `LocalScorer`.
    batch_size, max_input_length: where the `cfg` of `score_batch` does not set them.
    Raises UserError as the backend does.
    """

    def __init__(
        self,
        metricx_model_name: str,
        metricx_tokenizer_name: str | None = None,
        *,
        device: str = "auto",
        dtype: str = "float32",
        threads: int | None = None,
        matmul: str | None = None,
        max_batch_tokens: int | None = None,
        batch_size: int | None = None,
        max_input_length: int | None = None,
    ) -> None:
        super().__init__(
            MetricXBackend(
                metricx_model_name,
                metricx_tokenizer_name,
                device=device,
                dtype=dtype,
                threads=threads,
                matmul=matmul,
            ),
            max_batch_tokens=max_batch_tokens,
            batch_size=batch_size,
            max_input_length=max_input_length,
        )


def check_folder(folder: Path) -> None:
    """Raise UserError unless the folder holds an mT5 configuration and weights."""
    path = folder / "config.json"
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder}: no checkpoint of MetricX: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a model's configuration ({error})") from None
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if model_type != "mt5":
        raise UserError(f"{path}: model_type is {model_type!r}; MetricX-24 is an 'mt5' checkpoint")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise UserError(f"{folder}: no weights (*.safetensors or pytorch_model*.bin)")


def _input_fields(sample: TranslationSample, tokens: int, num_chars: int) -> dict[str, Any]:
    """Return the result's input fields, if the model read `num_chars` characters."""
    src_end = len("source: ") + len(sample.src)
    mt_start = src_end + len(" candidate: ")
    mt_end = mt_start + len(sample.mt)
    ref_end = 0 if sample.ref is None else mt_end + len(" reference: ") + len(sample.ref)
    return {
        "tokens": tokens,
        "truncated": {
            "src": num_chars < src_end,
            "mt": num_chars < mt_end,
            "ref": num_chars < ref_end,
        },
        "mt_covered": max(0, min(num_chars, mt_end) - mt_start),
    }


def _revision(folder: Path, name: str) -> str:
    if not looks_local(name):
        return folder.name  # a hub snapshot's folder is named after its commit
    return digest_files(
        p for p in folder.iterdir() if p.suffix in (".json", ".safetensors", ".bin")
    )


def _tokenizer_digest(folder: Path) -> str:
    return digest_files(p for pattern in T5_TOKENIZER_FILES for p in folder.glob(pattern))


def load_tokenizer(folder: Path, name: str) -> Tokenizer:
    """Return the tokenizer of a folder, from `spiece.model` or else `tokenizer.json`.

    A tokenizer.json next to spiece.model is not used, because each version of transformers writes
    different rules into it.
    name: the user's name of the folder.
    Raises UserError if the files are invalid, or if the two files have different pieces.
    """
    try:
        return _read_tokenizer(folder)
    except Exception as error:  # tokenizers raises nothing narrower
        reason = (str(error) or type(error).__name__).split("\n")[0]
        raise UserError(f"--tokenizer {name}: cannot be read: {reason}") from None


def _read_tokenizer(folder: Path) -> Tokenizer:
    settings = _tokenizer_settings(folder)
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


def _tokenizer_settings(folder: Path) -> dict[str, Any]:
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
