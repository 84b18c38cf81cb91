"""The sentence-transformers backend: encodes texts and returns vectors of length 1.

sentence-transformers runs the network, with pooling and dense layers. This module makes the ids,
because the tokenizer's thread can do so while the model computes, and because it can tell if a text
was cut.

A model folder is checked before it is loaded. Its `modules.json` lists the modules from ids to a
vector, each with its own folder. The file may name any Python class, and sentence-transformers
would import it from a local folder without asking. We accept only a fixed list of module types.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Unpack

from scorekit.digest import digest_files
from scorekit.documents import parse_json
from scorekit.errors import SampleError, UserError
from scorekit.hub import fetch_model, hide_short_progress, looks_local, public_name
from scorekit.server.backend import Encoded, Outcome, installed_versions
from scorekit.server.checkpoint_backend import CheckpointBackend, ModelOptions, token_positions
from scorekit.server.tokenizers import BoundedTokenizer
from scorekit.torch_files import check_weight_files
from services.embedder.endpoint import (
    EmbedderDescription,
    EmbedderRerankEndpoint,
    EmbeddingsEndpoint,
    EmbedOptions,
)

if TYPE_CHECKING:
    import torch


#: Larger limits mean "no limit": some tokenizers report 1e30.
_NO_LIMIT = 10**6
#: File patterns to download from the hub. ONNX and OpenVINO files are left out.
EMBEDDER_FILES = [
    "*.json",
    "*.safetensors",
    "pytorch_model*.bin",
    "*/pytorch_model.bin",
    "sentencepiece*",
    "*.model",
    "vocab.txt",
    "merges.txt",
]
#: Modules of sentence-transformers that a folder may name.
_STEPS = {"Transformer", "Pooling", "Dense", "Normalize", "LayerNorm", "Dropout"}
#: Suffixes of the model's files. The digest covers these files.
_SUFFIXES = {".json", ".safetensors", ".bin", ".model", ".txt"}


class EmbedderBackend(CheckpointBackend):
    """An embedding model from a local folder or a hub id.

    pooling, max_input_length: see the settings.
    """

    service = "embedder"
    endpoint = EmbeddingsEndpoint(EmbedderRerankEndpoint())

    def __init__(
        self,
        model: str,
        *,
        pooling: str | None = None,
        max_input_length: int | None = None,
        **options: Unpack[ModelOptions],
    ) -> None:
        super().__init__(model, **options)
        self._pooling = pooling
        self._max_length = max_input_length
        self._model: Any
        self._tokenizer: BoundedTokenizer

    def check(self) -> None:
        """Raise UserError if the settings cannot work. Loads nothing."""
        super().check()
        if looks_local(self._model_name):
            check_folder(fetch_model(self._model_name, None, [], "--model"), self._pooling)

    def load(self) -> EmbedderDescription:
        """Load the tokenizer and the network. Raises UserError if the files do not fit."""
        self.check()
        self._prepare_device()
        folder = fetch_model(self._model_name, self._revision, EMBEDDER_FILES, "--model").absolute()
        check_folder(folder, self._pooling)
        prompts, default_prompt = read_prompts(folder)
        self._model = self._network(folder)
        self._pack(self._model[0])  # its rows are tokens; those of later modules are texts
        pooling = _pooling(self._model, folder, any(prompts.values()))
        tokenizer = self._model[0].tokenizer
        if tokenizer is None or not tokenizer.is_fast:
            raise UserError(f"{folder}: the model has no fast tokenizer (tokenizer.json)")
        if tokenizer.truncation_side != "right":
            raise UserError(
                f"{folder}: the tokenizer cuts the start of a text. Set truncation_side to right"
            )
        self._limit = self._max_tokens(folder)
        self._pad = tokenizer.pad_token_id or 0
        self._tokenizer = BoundedTokenizer(tokenizer.backend_tokenizer)
        self._prefix_ids, self._suffix_ids = _added_ids(tokenizer.backend_tokenizer, folder)
        plain = self.encode([self.probe(1)], EmbedOptions(True, ""))[0]
        assert isinstance(plain, Encoded)
        return EmbedderDescription(
            model=public_name(self._model_name),
            revision=_revision(folder, self._model_name),
            tokenizer=public_name(self._model_name),
            dtype=self._dtype_name,
            device=str(self._device),
            matmul=self._matmul,
            max_input_length=self._limit,
            versions=installed_versions("torch", "transformers", "sentence-transformers"),
            engine={"pooling": pooling, "normalise": "l2", "max_length": f"{self._limit}"},
            pooling=pooling,
            dimension=self._vectors([plain]).shape[1],
            prompts=prompts,
            default_prompt=default_prompt,
        )

    def encode(self, samples: Sequence[str], options: EmbedOptions) -> list[Encoded | SampleError]:
        """Return the ids of each text, special tokens included.

        A text that is too long is cut at its end if the request allows it."""
        max_tokens = self._limit - len(self._prefix_ids) - len(self._suffix_ids)
        texts = [options.prompt + text for text in samples] if options.prompt else samples
        encoded: list[Encoded | SampleError] = []
        for tokenized in self._tokenizer.read(texts, max_tokens):
            if isinstance(tokenized, Exception):
                raise tokenized
            if tokenized.is_cut and not options.truncate:
                message = f"more than {self._limit} tokens; `truncate` would cut it"
                encoded.append(SampleError("overlong", message))
                continue
            ids = [*self._prefix_ids, *tokenized.ids, *self._suffix_ids]
            fields = {"tokens": len(ids), "truncated": {"input": tokenized.is_cut}}
            encoded.append(Encoded(len(ids), fields, ids))
        return encoded

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        """Return the vectors, float32 [D], in order."""
        return [{"embedding": vector} for vector in self._vectors(batch).numpy()]

    def _vectors(self, batch: Sequence[Encoded]) -> torch.Tensor:
        """Return vectors [B, D] of length 1 on the CPU."""
        import torch

        longest = max(encoded.length for encoded in batch)
        padded_ids = [
            encoded.payload + [self._pad] * (longest - encoded.length) for encoded in batch
        ]
        mask = [[1] * encoded.length + [0] * (longest - encoded.length) for encoded in batch]
        features = {
            "input_ids": torch.tensor(padded_ids, device=self._device),
            "attention_mask": torch.tensor(mask, device=self._device),
        }
        with torch.inference_mode():
            vectors_BD = self._model(features)["sentence_embedding"].float()
            vectors_BD = vectors_BD[:, : self._model.truncate_dim]
            # Normalize in float32, even if the model's last module did it in bfloat16.
            return torch.nn.functional.normalize(vectors_BD, dim=1).cpu()

    def probe(self, words: int) -> str:
        """Return a text of about `words` words."""
        return "word " * words

    def _network(self, folder: Path) -> Any:
        import torch
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

        hide_short_progress()
        weights = {"dtype": getattr(torch, self._dtype_name), "local_files_only": True}
        local, device = {"local_files_only": True}, str(self._device)
        try:
            if self._pooling is None:
                model = SentenceTransformer(
                    str(folder), device=device, local_files_only=True, model_kwargs=weights
                )
            else:
                transformer = Transformer(
                    str(folder), model_kwargs=weights, processor_kwargs=local, config_kwargs=local
                )
                pooling = Pooling(transformer.get_embedding_dimension(), self._pooling)
                model = SentenceTransformer(modules=[transformer, pooling], device=device)
        except Exception as error:  # a field of the wrong type, a shape that does not fit
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"--model {folder}: cannot be loaded: {reason}") from None
        if "message" in model[0].modality_config:
            raise UserError(
                f"--model {folder}: the model expects chats, not texts (it has a chat template)"
            )
        return model.train(False).requires_grad_(False)

    def _max_tokens(self, folder: Path) -> int:
        """Return the model's token limit, or the user's lower one. Raises UserError if higher."""
        transformer = self._model[0]
        limits = [transformer.max_seq_length, token_positions(transformer.model)]
        model_limit = min((limit for limit in limits if limit and limit < _NO_LIMIT), default=None)
        max_tokens = self._max_length or model_limit
        if max_tokens is None:
            raise UserError(f"{folder}: the model states no token limit. Set --max-input-length")
        if model_limit is not None and max_tokens > model_limit:
            raise UserError(
                f"--max-input-length {max_tokens}: the model's limit is {model_limit} tokens"
            )
        return int(max_tokens)


def _pooling(model: Any, folder: Path, has_prompts: bool) -> str:
    """Return the pooling mode as sentence-transformers names it.

    Raises UserError if the pooling excludes prompts, which this service does not support."""
    from sentence_transformers.sentence_transformer.modules import Pooling

    for step in model:
        if isinstance(step, Pooling):
            if has_prompts and not step.include_prompt:
                raise UserError(f"{folder}: its pooling excludes prompts, which is not supported")
            modes = step.pooling_mode
            return modes if isinstance(modes, str) else "+".join(modes)
    return "none"  # the network itself gives one vector


def _added_ids(tokenizer: Any, folder: Path) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer adds before and after every text."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a").ids
    for start in range(len(full) - len(bare) + 1):
        if bare and full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    raise UserError(f"{folder}: cannot tell which special tokens the tokenizer adds")


def _revision(folder: Path, name: str) -> str:
    # A hub snapshot's folder is named after its commit.
    return digest_folder(folder) if looks_local(name) else folder.name


def check_folder(folder: Path, pooling: str | None) -> None:
    """Raise UserError unless the folder holds a model that can be served.

    pooling: the user's --pooling, required only if the folder has no modules.json.
    """
    if not folder.is_dir():
        raise UserError(f"--model {folder}: this is not a folder")
    steps = _steps(folder)
    if steps is None:
        if pooling is None:
            raise UserError(
                f"--model {folder}: the folder has no modules.json, which names the pooling. "
                "Set it: --pooling cls or --pooling mean"
            )
    elif pooling is not None:
        raise UserError(
            f"--pooling {pooling}: {folder}/modules.json already sets it. Remove the option"
        )
    root = folder / steps[0][1] if steps else folder
    if not isinstance(_json(root / "config.json"), dict):
        raise UserError(f"{root}/config.json: not a model's configuration")
    if (root / "adapter_config.json").exists():
        raise UserError(f"{root}: the folder holds an adapter. Merge it with its base model first")
    if not any(root.glob("*.safetensors")) and not any(root.glob("pytorch_model*.bin")):
        raise UserError(f"{root}: no weights (*.safetensors or pytorch_model*.bin)")
    for subfolder in [path for _, path in steps] if steps else [""]:
        check_weight_files(folder / subfolder)


def read_prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, and the name of the default prompt (None: no prompt).

    Raises UserError if config_sentence_transformers.json is invalid."""
    path = folder / "config_sentence_transformers.json"
    config = _json(path) if path.exists() else {}
    prompts = config.get("prompts") or {} if isinstance(config, dict) else None
    if not isinstance(prompts, dict):
        raise UserError(f"{path}: prompts is not a mapping of names to texts")
    prompts = {name: "" if text is None else text for name, text in prompts.items()}
    default = config.get("default_prompt_name")
    if not all(isinstance(text, str) for text in prompts.values()):
        raise UserError(f"{path}: prompts is not a mapping of names to texts")
    if default is not None and default not in prompts:
        raise UserError(f"{path}: default_prompt_name is not a key of prompts")
    return prompts, default


def digest_folder(folder: Path) -> str:
    """Return one digest over the model's files and the names of their folders."""
    subfolders = [path for _, path in _steps(folder) or []]
    digest = hashlib.blake2b(digest_size=16)
    for subfolder in sorted({"", *subfolders}):
        files = [p for p in _files(folder / subfolder) if p.suffix in _SUFFIXES]
        digest.update(f"{subfolder}\0{digest_files(files)}\0".encode())
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []


def _steps(folder: Path) -> list[tuple[str, str]] | None:
    """Return (class, folder) of each module; None without modules.json.

    Raises UserError for an unknown module type and for a path outside the folder."""
    path = folder / "modules.json"
    if not path.exists():
        return None
    try:
        steps = [(step["type"], step["path"]) for step in _json(path)]
    except (TypeError, KeyError):
        steps = []
    if not steps or not all(isinstance(part, str) for step in steps for part in step):
        raise UserError(f"{path}: expected a list of modules, each with `type` and `path`")
    for module_class, subfolder in steps:
        name = module_class.rpartition(".")[2]
        if not module_class.startswith("sentence_transformers.") or name not in _STEPS:
            supported = ", ".join(sorted(_STEPS))
            raise UserError(
                f"{path}: unknown module type {module_class[:80]!r}. Supported types: {supported}"
            )
        if PurePosixPath(subfolder).is_absolute() or ".." in PurePosixPath(subfolder).parts:
            raise UserError(f"{path}: a module's path leads out of the folder")
        if name == "Dense":
            _check_activation(folder / subfolder / "config.json")
    if not steps[0][0].endswith(".Transformer"):
        raise UserError(f"{path}: the first module must be a Transformer")
    return steps


def _check_activation(path: Path) -> None:
    """Raise UserError unless the activation is one of torch's.

    sentence-transformers would replace another one by tanh, with at most a warning."""
    config = _json(path)
    activation = config.get("activation_function") if isinstance(config, dict) else None
    if not isinstance(activation, str) or not activation.startswith("torch.nn.modules."):
        raise UserError(f"{path}: activation_function must be a class of torch.nn.modules")


def _json(path: Path) -> Any:
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {type(error).__name__}") from None
