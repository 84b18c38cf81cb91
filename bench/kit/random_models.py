"""Models of a published size with random weights, made on their device: nothing to download.

    python -m bench.kit.random_models --kind xcomet --size xl --device cuda --port 8011

Speed does not depend on the weights' values. Tokenizers are the demo's small ones, so that texts
have more tokens than with the published vocabularies.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from bench.common import ROOT, WORK
from scorekit.command import clean_exit
from scorekit.server.backend import ScoringBackend
from scorekit.server.score_endpoint import ScoreDescription
from scorekit.server.settings import ServiceSettings
from services.metricx.model import MetricXBackend
from services.xcomet.checkpoint import Checkpoint
from services.xcomet.model import XCometBackend

Kind = Literal["metricx", "xcomet"]
Size = Literal["tiny", "large", "xl"]
#: mT5-large and mT5-XL, as MetricX-24 has them.
MT5: dict[str, dict[str, Any]] = {
    "tiny": {"d_model": 64, "d_ff": 128, "num_heads": 2, "num_layers": 2, "vocab_size": 4000},
    "large": {
        "d_model": 1024,
        "d_ff": 2816,
        "num_heads": 16,
        "num_layers": 24,
        "vocab_size": 250_112,
    },
    "xl": {"d_model": 2048, "d_ff": 5120, "num_heads": 32, "num_layers": 24, "vocab_size": 250_112},
}
#: XLM-R XL, as XCOMET-XL has it.
XLMR: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 4000,
    },
    "xl": {
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "vocab_size": 250_880,
    },
}


def backend(kind: Kind, size: Size, device: str, dtype: str, threads: int | None) -> ScoringBackend:
    """Return the service's own backend with a model of that size."""
    backend_class = RandomMetricX if kind == "metricx" else RandomXComet
    return backend_class(str(folder(kind, size)), device=device, dtype=dtype, threads=threads)


class RandomMetricX(MetricXBackend):
    """MetricXBackend whose weights are not read."""

    def load(self) -> ScoreDescription:
        """Load the model like the service, with random weights."""
        with mock.patch("services.metricx.regression.load_regression", _random_regression):
            return super().load()


class RandomXComet(XCometBackend):
    """XCometBackend whose weights are not read."""

    def _find(self) -> Checkpoint:
        path = Path(self._model_name)
        return Checkpoint(
            kind="xcomet_metric",
            name=path.name,
            revision="random",
            file=path,
            hparams_file=path,
            encoder_model="XLM-RoBERTa-XL",
            encoder=str(path),
            layer_transformation="softmax",
            keys=frozenset(),
        )

    def load(self) -> ScoreDescription:
        """Load the model like the service, with random weights."""

        def make(checkpoint: Checkpoint, *_: Any) -> Any:
            metric = random_xcomet(Path(checkpoint.encoder), self._device, self._dtype_name)
            for name, module in metric.named_children():
                if name != "encoder":  # the heads and their layer mix stay in float32
                    module.float()
            return metric

        with mock.patch("services.xcomet.loading.load_metric", make):
            return super().load()


def folder(kind: Kind, size: Size) -> Path:
    """Return a folder with the configuration and the demo's tokenizer, and no weights."""
    from transformers import MT5Config, XLMRobertaXLConfig

    path = WORK / "models" / f"random-{kind}-{size}"
    source = ROOT / ("demo/models/metricx" if kind == "metricx" else "demo/models/xcomet/encoder")
    path.mkdir(parents=True, exist_ok=True)
    for file in source.glob("*token*.json"):
        shutil.copy(file, path)
    if kind == "metricx":
        shape = MT5[size]
        layers = {"num_decoder_layers": shape["num_layers"], "d_kv": 64}
        MT5Config.from_pretrained(source, **shape, **layers).save_pretrained(path)
        (path / "model.safetensors").touch()  # what the check of a folder looks for
    else:
        XLMRobertaXLConfig.from_pretrained(source, **XLMR[size]).save_pretrained(path)
    return path


def random_mt5(path: Path, device: Any, dtype: str) -> Any:
    """Return transformers' own mT5, for upstream's way of calling."""
    from transformers import MT5Config, MT5ForConditionalGeneration

    config = MT5Config.from_pretrained(path)
    return _fill(lambda: MT5ForConditionalGeneration(config).eval(), device, dtype)


def random_xcomet(path: Path, device: Any, dtype: str) -> Any:
    """Return our own networks of XCOMETMetric, all of them in `dtype`."""

    def make(path: Path, word_layer: int, hidden_sizes: list[int]) -> Any:
        from services.xcomet.classes import hyper_parameters
        from services.xcomet.networks import Metric

        arguments = {
            "pretrained_model": str(path),
            "word_layer": word_layer,
            "hidden_sizes": hidden_sizes,
            "layer_transformation": "softmax",
        }
        return Metric("xcomet_metric", hyper_parameters("xcomet_metric", arguments), local=True)

    return random_metric(make, path, device, dtype)


def random_metric(
    make: Callable[[Path, int, list[int]], Any], path: Path, device: Any, dtype: str
) -> Any:
    """Return an XCOMETMetric of a folder's encoder, ours or upstream's, filled on its device.

    make: gets the folder, the word layer and the head's sizes.
    """
    import torch
    from transformers import XLMRobertaXLConfig

    config = XLMRobertaXLConfig.from_pretrained(path)
    with _default_dtype(dtype), torch.device(device):
        torch.manual_seed(1)
        sizes = [config.hidden_size, config.hidden_size // 2]
        metric = make(path, config.num_hidden_layers, sizes).eval()
        with torch.no_grad():
            metric.hidden2tag.bias[0] = 2.0  # else three of four subwords would be errors
    # Some of its tensors are float32 whatever the default is.
    return metric.to(getattr(torch, dtype)).requires_grad_(False)


def _random_regression(path: Path, dtype: Any, device: Any) -> Any:
    from transformers import MT5Config

    from services.metricx.regression import empty_regression

    config = MT5Config.from_pretrained(path)
    name = str(dtype).removeprefix("torch.")
    model = _fill(lambda: empty_regression(config), device, name)
    model.encoder.embed_tokens = model.decoder.embed_tokens = model.shared
    return model


def _fill(make: Callable[[], Any], device: Any, dtype: str) -> Any:
    """Return a network that is created without memory, then allocated and filled on the device."""
    import torch

    with _default_dtype(dtype), torch.device("meta"):
        model = make()
    model = model.to_empty(device=device)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(std=weight.shape[1] ** -0.5)
            else:
                weight.fill_(1.0)
    return model.requires_grad_(False)


@contextlib.contextmanager
def _default_dtype(name: str) -> Iterator[None]:
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class RandomSettings(ServiceSettings):
    """Serve a model of a published size with random weights."""

    model_config = SettingsConfigDict(env_prefix="RANDOM_", cli_prog_name="bench.kit.random_models")

    kind: Kind = Field("xcomet", description="Which service it is.")
    size: Size = Field("tiny", description="Which size.")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="Precision.")


def make_backend(settings: RandomSettings) -> ScoringBackend:
    """Return the backend that the settings describe."""
    return backend(settings.kind, settings.size, settings.device, settings.dtype, settings.threads)


if __name__ == "__main__":
    from scorekit.server.run import main

    with clean_exit():
        main(RandomSettings, make_backend)
