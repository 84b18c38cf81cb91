"""The backend of the COMET family: unbabel-comet's weights and rules without unbabel-comet.

`joint` and `pooled` contain the classes' computations."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Unpack

from scorekit.digest import digest_files
from scorekit.errors import SampleError, UserError
from scorekit.hub import XCOMET_FILES, fetch_model, looks_local
from scorekit.schemas import TranslationSample, XCometOptions
from scorekit.server.backend import (
    Encoded,
    Outcome,
    installed_versions,
    translation_probe,
)
from scorekit.server.checkpoint_backend import CheckpointBackend, ModelOptions
from scorekit.server.local import LocalScorer
from scorekit.server.score_endpoint import ScoreDescription, ScoreEndpoint
from scorekit.server.tokenizers import BoundedTokenizer, TokenizedText
from services.xcomet.checkpoint import Checkpoint, find_file, inspect
from services.xcomet.upstream import check_installed


class XCometBackend(CheckpointBackend):
    """A checkpoint of the COMET family (XCOMET-XL, COMET-22, CometKiwi, ...) that scores batches.

    model: hub id, folder, or `.ckpt`.
    encoder: folder or hub id of the encoder's config and tokenizer, instead of the stored one.
    implementation: own, or unbabel-comet to use its networks (in an environment that has it).
    options: of them dtype (float32, bfloat16 or float16) is that of the encoder; the heads stay in
    float32.
    """

    service = "xcomet"
    endpoint = ScoreEndpoint(TranslationSample, XCometOptions)

    def __init__(
        self,
        model: str = "Unbabel/XCOMET-XL",
        encoder: str | None = None,
        *,
        implementation: str = "own",
        **options: Unpack[ModelOptions],
    ) -> None:
        if implementation != "own" and options.get("matmul") in (None, "auto"):
            options["matmul"] = "torch"  # unbabel-comet as it is
        super().__init__(model, **options)
        self._encoder_name = encoder
        self._implementation = implementation

    def check(self) -> None:
        """Raise UserError if the settings cannot work. Reads no weights.

        A model of the hub is checked by `load`, once it has been fetched.
        """
        super().check()
        if self._implementation == "unbabel-comet":
            if self._matmul_setting == "onednn":
                raise UserError("--matmul onednn: it is for --implementation own; say auto")
            check_installed()
        if looks_local(self._model_name):
            self._find()

    def load(self) -> ScoreDescription:
        """Load tokenizer and weights. Raises UserError if the files are not of this family."""
        import torch

        super().check()
        device = self._prepare_device()
        checkpoint = self._find()
        from services.xcomet.loading import load_comet

        dtype = getattr(torch, self._dtype_name)
        self.comet = load_comet(checkpoint, device, dtype, self._implementation)
        self._pack(self.comet.transformer)
        self._tokenizer = BoundedTokenizer(self.comet.tokenizer.backend_tokenizer)
        return self._describe(checkpoint)

    def encode(
        self, samples: Sequence[TranslationSample], options: XCometOptions
    ) -> list[Encoded | SampleError]:
        """Tokenize as upstream does. `tokens` counts all ids that the model reads."""
        limit = min(options.max_input_length or self.comet.limit, self.comet.limit)
        texts = [self.comet.texts(sample) for sample in samples]
        # Upstream first cuts each text alone, to limit - 2 with its own <s> and </s>.
        tokenized = self._tokenizer.read(
            [
                text
                for sample_texts in texts
                if isinstance(sample_texts, dict)
                for text in sample_texts.values()
            ],
            limit - 4,
            count=options.overlong == "error",
        )
        return [
            sample_texts
            if isinstance(sample_texts, SampleError)
            else self._encode(sample_texts, tokenized, limit, options)
            for sample_texts in texts
        ]

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        """Return the scores of a batch, and spans if the class has them."""
        import torch

        with torch.inference_mode():
            return self.comet.forward(batch)

    def probe(self, words: int) -> TranslationSample:
        """Return a translation of about `words` words on each side."""
        sample = translation_probe(words)
        requires_reference = self.comet.inputs["ref"] == "required"
        return sample.model_copy(update={"ref": sample.mt}) if requires_reference else sample

    def _encode(
        self,
        texts: dict[str, str],
        tokenized: Iterator[TokenizedText | Exception],
        limit: int,
        options: XCometOptions,
    ) -> Encoded | SampleError:
        """Return an encoded sample; takes the next of `tokenized` for each of its texts."""
        read: dict[str, TokenizedText] = {}
        error = None
        for name in texts:
            part = next(tokenized)
            if isinstance(part, TokenizedText):
                read[name] = part
            else:
                message = f"{name}: the tokenizer cannot read this text"
                error = error or SampleError("invalid_input", message)
        return error or self.comet.assemble(read, texts["mt"], limit, options)

    def _find(self) -> Checkpoint:
        folder = fetch_model(self._model_name, self._revision, XCOMET_FILES, "--model")
        file = find_file(folder)
        if looks_local(self._model_name):
            return inspect(file, self._encoder_name)
        # The hub's cache names a snapshot's folder after its commit.
        return inspect(file, self._encoder_name, name=self._model_name, revision=folder.name)

    def _describe(self, checkpoint: Checkpoint) -> ScoreDescription:
        comet = self.comet
        tokenizer = comet.tokenizer.backend_tokenizer.to_str().encode()
        local, is_own = checkpoint.encoder_is_local, self._implementation == "own"
        return ScoreDescription(
            model=checkpoint.name,
            revision=checkpoint.revision or digest_files(checkpoint.scoring_files()),
            tokenizer=checkpoint.encoder.rsplit("/", 1)[-1] if local else checkpoint.encoder,
            dtype=self._dtype_name,
            device=str(self._device),
            matmul=self._matmul,
            max_input_length=comet.limit,
            score_range=comet.score_range,
            higher_is_better=True,
            inputs=comet.inputs,
            versions={
                **installed_versions("torch", "transformers", "tokenizers"),
                "comet": None if is_own else installed_versions("unbabel-comet")["unbabel-comet"],
            },
            engine={  # part of the cache key: implementations do not share scores
                "implementation": self._implementation,
                "attention": str(comet.transformer.config._attn_implementation),
                "layer_transformation": checkpoint.layer_transformation,
                "tokenizer_digest": hashlib.blake2b(tokenizer, digest_size=16).hexdigest(),
            },
        )


class XCometXLScorer(LocalScorer):
    """xCOMET in this process: `score_batch(samples, cfg) -> RewardOutput`.

    device, dtype, threads, matmul: see `ModelOptions`.
    max_batch_tokens: see `LocalScorer`.
    batch_size, max_input_length: where the `cfg` of `score_batch` does not set them.
    Raises UserError as the backend does.
    """

    def __init__(
        self,
        xcomet_model_name: str = "Unbabel/XCOMET-XL",
        encoder: str | None = None,
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
            XCometBackend(
                xcomet_model_name,
                encoder,
                device=device,
                dtype=dtype,
                threads=threads,
                matmul=matmul,
            ),
            max_batch_tokens=max_batch_tokens,
            batch_size=batch_size,
            max_input_length=max_input_length,
        )
