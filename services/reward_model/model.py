"""The backend of a local reward model: any sequence classifier of transformers, in batches.

The score of a sample is that of transformers' own forward of this sample alone:

- Inputs are padded on the right, whatever the tokenizer's side is: so positions start at 0, and no
  token sees the padding.
- A decoder's head looks at the last token that is not the model's padding token
  (`GenericForSequenceClassification`). A model without one refuses batches. Then a batch gets one
  of its own: any id that is not the last of a sample, so that the last token is found.
- The padding token of the tokenizer is not used: the model may have no row for it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from scorekit.digest import digest_files
from scorekit.documents import parse_json
from scorekit.errors import SampleError, UserError
from scorekit.hub import REWARD_FILES, fetch_model, hide_short_progress, looks_local, public_name
from scorekit.schemas import ChatMessage, RewardOptions, RewardSample
from scorekit.server.backend import Encoded, Outcome, installed_versions
from scorekit.server.checkpoint_backend import CheckpointBackend, ModelOptions, token_positions
from scorekit.torch_files import check_weight_files
from services.reward_model.endpoint import (
    RewardDescription,
    RewardEndpoint,
    RewardRerankEndpoint,
    weighted_sum,
)
from services.reward_model.inputs import InputMaker, ModelInput
from services.reward_model.prompts import BUILT_IN, ScoringPrompt, find_prompt
from services.reward_model.settings import MAX_INPUT_LENGTH

_HEAD = "ForSequenceClassification"
#: Suffixes of the files that the digest of a local folder covers.
_SUFFIXES = {".json", ".safetensors", ".bin", ".model", ".txt", ".jinja"}
#: Limits above it mean that there is none: some tokenizers report 1e30.
_NO_LIMIT = 10**7
#: A network with fewer weights beside its embeddings spends much of a small batch on the calls
#: themselves. On a CPU it gets batches of 768 tokens: with 5 million weights they took 0.63 times
#: the processor seconds of those of 256, with 85 million the same.
_FEW_WEIGHTS, _BATCH_TOKENS_OF_FEW = 20_000_000, 768
#: Largest difference between a score alone and beside a longer sample, in float32.
_PADDING_TOLERANCE = 1e-3


class RewardModelBackend(CheckpointBackend):
    """A reward model from a local folder or a hub id. The other arguments: see the settings."""

    service = "reward_model"

    def __init__(
        self,
        model: str,
        *,
        weights: str | None = None,
        max_input_length: int | None = None,
        chat_template: Path | None = None,
        prompt: str | None = None,
        **options: Unpack[ModelOptions],
    ) -> None:
        super().__init__(model, **options)
        self.endpoint = RewardEndpoint(RewardRerankEndpoint())
        self._named_weights = None if weights is None else parse_weights(weights)
        self._max_length = max_input_length
        self._template = None if chat_template is None else _read_template(chat_template)
        self._prompt_name = prompt
        self._prompt = None if prompt is None else find_prompt(prompt)
        self._model: Any
        self._inputs: InputMaker
        self._pad: int | None = None
        self._rows = 0
        self._labels: list[str] = []
        self._weights: Mapping[str, float] = {}

    def check(self) -> None:
        """Raise UserError if the settings cannot work. Loads nothing."""
        super().check()
        if looks_local(self._model_name):
            check_folder(fetch_model(self._model_name, None, [], "--model"))

    def load(self) -> RewardDescription:
        """Load the tokenizer and the network. Raises UserError if the files do not fit."""
        self.check()
        device = self._prepare_device()
        folder = fetch_model(self._model_name, self._revision, REWARD_FILES, "--model").absolute()
        check_folder(folder)
        self._labels = _labels(_config(folder), folder)  # mistakes, before minutes of loading
        self._weights = resolve_weights(self._named_weights, self._labels, self._model_name)
        tokenizer = _tokenizer(folder)
        self._inputs = InputMaker(tokenizer, MAX_INPUT_LENGTH, self._template)
        name, prompt = self._choose_prompt()
        self._prompt = prompt
        self._model = self._network(folder)
        length = self._inputs.max_length = self._length(tokenizer)
        self._rows = self._model.get_input_embeddings().num_embeddings
        self._pad = _text_config(self._model).pad_token_id
        _text_config(self._model).use_cache = False  # keys and values of a text that does not go on
        batch_tokens = self._batch_tokens()
        self._pack(self._model)
        if self._dtype_name == "float32":
            self._check_padding(folder)
        return RewardDescription(
            model=public_name(self._model_name),
            revision=_revision(folder, self._model_name),
            tokenizer=public_name(self._model_name),
            dtype=self._dtype_name,
            device=str(device),
            matmul=self._matmul,
            max_input_length=length,
            score_range=prompt.range(),
            higher_is_better=prompt.higher_is_better,
            inputs=prompt.inputs(),
            versions=installed_versions("torch", "transformers", "tokenizers"),
            engine={
                "attention": str(self._model.config._attn_implementation),
                "weights": repr(dict(self._weights)),
                "max_length": f"{length}",
                "template": _digest(self._inputs.template or ""),
                "prompt": _digest(prompt.model_dump_json()),
            },
            batch_tokens=batch_tokens,
            weights=self._weights,
            has_chat_template=self._inputs.template is not None,
            takes_pairs=self._inputs.takes_pairs,
            prompt=name,
        )

    def encode(
        self, samples: Sequence[RewardSample], options: RewardOptions
    ) -> list[Encoded | SampleError]:
        """Return the ids of each sample, those that the model's template or tokenizer adds
        included."""
        assert self._prompt is not None
        forms: list[Any] = []
        for sample in samples:
            try:
                forms.append(self._prompt.form_of(sample))
            except SampleError as error:
                forms.append(error)
        good = [form for form in forms if not isinstance(form, SampleError)]
        inputs = iter(self._inputs.make(good, may_cut=options.overlong == "truncate"))
        results = [form if isinstance(form, SampleError) else next(inputs) for form in forms]
        return [
            result if isinstance(result, SampleError) else self._encode(result)
            for result in results
        ]

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        """Return the model's outputs by label, and their weighted sum."""
        outcomes: list[Outcome] = []
        for row in self._logits([encoded.payload for encoded in batch]):
            labels = dict(zip(self._labels, row, strict=True))
            outcomes.append({"score": weighted_sum(labels, self._weights), "labels": labels})
        return outcomes

    def probe(self, words: int) -> RewardSample:
        """Return a text of about `words` words, as a conversation if the model takes those."""
        text = "word " * words
        if self._inputs.template is None:
            return RewardSample(text=text)
        turns = [ChatMessage(role="user", content=text)]
        return RewardSample(messages=[*turns, ChatMessage(role="assistant", content="word")])

    def _encode(self, model_input: ModelInput) -> Encoded | SampleError:
        if max(model_input.ids) >= self._rows:  # it would end the process on a GPU
            message = (
                f"it has the id {max(model_input.ids)}, and the weights have {self._rows} rows"
            )
            return SampleError("invalid_input", message)
        fields = {
            "tokens": model_input.tokens,
            "truncated": model_input.truncated,
            "mt_covered": model_input.mt_covered,
        }
        return Encoded(len(model_input.ids), fields, model_input)

    def _logits(self, inputs: Sequence[ModelInput]) -> list[list[float]]:
        """Return the outputs [B, labels] of inputs, which are padded to the longest."""
        import torch

        longest = max(len(item.ids) for item in inputs)
        pad = self._pad
        if pad is None:
            last_ids = {item.ids[-1] for item in inputs}
            pad = next(id for id in range(len(last_ids) + 1) if id not in last_ids)
            _text_config(self._model).pad_token_id = self._model.config.pad_token_id = pad
        padding = [longest - len(item.ids) for item in inputs]
        rows = {
            "input_ids": [i.ids + [pad] * n for i, n in zip(inputs, padding, strict=True)],
            "attention_mask": [
                [1] * len(i.ids) + [0] * n for i, n in zip(inputs, padding, strict=True)
            ],
        }
        if inputs[0].type_ids is not None:
            rows["token_type_ids"] = [
                (i.type_ids or []) + [0] * n for i, n in zip(inputs, padding, strict=True)
            ]
        tensors = {name: torch.tensor(row, device=self._device) for name, row in rows.items()}
        with torch.inference_mode():
            logits: list[list[float]] = self._model(**tensors).logits.float().tolist()
        return logits

    def _network(self, folder: Path) -> Any:
        import torch
        from transformers import AutoModelForSequenceClassification

        hide_short_progress()
        try:
            model, report = AutoModelForSequenceClassification.from_pretrained(
                str(folder),
                dtype=getattr(torch, self._dtype_name),
                local_files_only=True,
                output_loading_info=True,
            )
        except Exception as error:  # a field of the wrong type, a shape that does not fit
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"--model {folder}: cannot be loaded: {reason}") from None
        if missing := sorted(report["missing_keys"]):
            raise UserError(
                f"--model {folder}: it has no weights of {missing[0]}, which would be random "
                "numbers: not a model with a trained classification head"
            )
        return model.to(self._device).train(False).requires_grad_(False)

    def _length(self, tokenizer: Any) -> int:
        """Return the limit in tokens. Raises UserError for one above the model's."""
        limits = [tokenizer.model_max_length, token_positions(self._model.base_model)]
        model_limit = min((limit for limit in limits if limit and limit < _NO_LIMIT), default=None)
        if (
            model_limit is not None
            and self._max_length is not None
            and self._max_length > model_limit
        ):
            raise UserError(
                f"--max-input-length {self._max_length}: the model's limit is {model_limit} tokens"
            )
        return int(self._max_length or min(model_limit or MAX_INPUT_LENGTH, MAX_INPUT_LENGTH))

    def _batch_tokens(self) -> int | None:
        """Return the padded tokens of a batch where they depend on the network."""
        assert self._device is not None
        weights = sum(parameter.numel() for parameter in self._model.parameters())
        weights -= self._model.get_input_embeddings().weight.numel()
        is_small = self._device.type == "cpu" and weights < _FEW_WEIGHTS
        return _BATCH_TOKENS_OF_FEW if is_small else None

    def _choose_prompt(self) -> tuple[str, ScoringPrompt]:
        """Return the prompt and its name. Raises UserError if the model cannot read it."""
        makes_chats, takes_pairs = self._inputs.template is not None, self._inputs.takes_pairs
        name = self._prompt_name
        if name is None:
            name = "messages" if makes_chats else "pair" if takes_pairs else "text"
        prompt = self._prompt or BUILT_IN[name]
        if prompt.messages is not None and not makes_chats:
            raise UserError(
                f"--prompt {name}: the model has no chat template: --chat-template FILE"
            )
        if prompt.pair is not None and not takes_pairs:
            raise UserError(
                f"--prompt {name}: the model's tokenizer sets no mark between two texts"
            )
        return Path(name).name, prompt

    def _check_padding(self, folder: Path) -> None:
        """Raise UserError if a score depends on the padding beside a longer sample."""
        options = RewardOptions(overlong="truncate")
        short, long = self.encode([self.probe(2), self.probe(9)], options)
        assert isinstance(short, Encoded) and isinstance(long, Encoded)
        (alone,) = self._logits([short.payload])
        batched = self._logits([short.payload, long.payload])[0]
        difference = max(abs(a - b) for a, b in zip(alone, batched, strict=True))
        if difference > _PADDING_TOLERANCE * max(1.0, *map(abs, alone)):
            raise UserError(
                f"--model {folder}: a score differs by {difference:.3g} beside a longer text: this "
                "network does not read padding on the right, and cannot be served in batches"
            )


def check_folder(folder: Path) -> None:
    """Raise UserError unless the folder holds a sequence classifier of transformers."""
    if not folder.is_dir():
        raise UserError(f"--model {folder}: this is not a folder")
    path = folder / "config.json"
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"--model {folder}: no model: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a model's configuration ({error})") from None
    classes = config.get("architectures") if isinstance(config, dict) else None
    name = classes[0] if isinstance(classes, list) and classes else None
    if not isinstance(name, str) or not name.endswith(_HEAD):
        raise UserError(
            f"{path}: architectures is {name!s:.80}, a model without a classification head; a "
            f"reward model is a ...{_HEAD}"
        )
    check_weight_files(folder)


def parse_weights(text: str) -> dict[str, float]:
    """Return the weights in LABEL=NUMBER,... Raises UserError."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not name.strip() or not math.isfinite(value):
            raise UserError(f"--weights {part.strip():.80}: write LABEL=NUMBER,LABEL=NUMBER")
        if name.strip() in weights:
            raise UserError(f"--weights: {name.strip():.80} is named twice")
        weights[name.strip()] = value
    if not any(weights.values()):
        raise UserError(f"--weights {text:.80}: every weight is 0")
    return weights


def resolve_weights(
    named: Mapping[str, float] | None, labels: Sequence[str], model: str
) -> dict[str, float]:
    """Return the weight of each label, in the model's order. Raises UserError."""
    names = ", ".join(labels[:10]) + (", ..." if len(labels) > 10 else "")
    if named is None:
        if len(labels) > 1:
            raise UserError(
                f"--model {model}: it has {len(labels)} labels ({names}): say what each counts in "
                f"the score, --weights {labels[0]}=1"
            )
        return {labels[0]: 1.0}
    if unknown := sorted(named.keys() - set(labels)):
        raise UserError(f"--weights: the model has no label {unknown[0]!r:.80}; it has {names}")
    return {label: named.get(label, 0.0) for label in labels}


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--chat-template {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"--chat-template {path}: not UTF-8 text") from None


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # a field of the wrong type, an unknown architecture
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"--model {folder}: cannot be loaded: {reason}") from None


def _labels(config: Any, folder: Path) -> list[str]:
    """Return the names of the labels in the order of the outputs. Raises UserError."""
    labels = [str(config.id2label[index]) for index in range(config.num_labels)]
    if len(set(labels)) < len(labels):
        raise UserError(f"{folder}/config.json: id2label has a name twice")
    return labels


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{folder}: its tokenizer cannot be loaded: {reason}") from None


def _text_config(model: Any) -> Any:
    return model.config.get_text_config()


def _revision(folder: Path, name: str) -> str:
    if not looks_local(name):
        return folder.name  # a hub snapshot's folder is named after its commit
    return digest_files(p for p in folder.iterdir() if p.suffix in _SUFFIXES and p.is_file())


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
