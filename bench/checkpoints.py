"""Makes checkpoints with random weights, the real architectures and a realistic size.

Each is made once, deterministically, under runs/bench, and has about 25 million parameters outside
its embeddings. Tokenizers are the demo's.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.common import ROOT, WORK
from scorekit.command import clean_exit
from testing.pairs import read_pairs

#: Layers, width and inner width of the xCOMET encoder; XLM-R-XL has 36, 2560 and 10240.
XCOMET: dict[str, Any] = {"layers": 8, "hidden": 512, "heads": 8, "intermediate": 2048}
#: The mT5 of MetricX: as many decoder layers as encoder layers, as in the published ones.
MT5: dict[str, Any] = {"d_model": 512, "d_kv": 64, "num_heads": 8, "d_ff": 1024, "num_layers": 4}
_WANTED = range(24_000_000, 26_000_001)


def xcomet() -> Path:
    """Return the folder of an `xcomet_metric` checkpoint with an XLM-R-XL encoder."""
    return _made_once("xcomet-25m", _make_xcomet)


def metricx() -> Path:
    """Return the folder of an mT5 regression checkpoint."""
    return _made_once("metricx-25m", _make_metricx)


def _made_once(name: str, make: Callable[[Path], None]) -> Path:
    folder = WORK / "models" / name
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            make(Path(work) / name)
            shutil.move(Path(work) / name, folder)
    return folder


def _make_xcomet(folder: Path) -> None:
    import torch

    from testing.checkpoints.xcomet import build_checkpoint

    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    samples = [{"src": pair.src, "mt": pair.mt} for pair in read_pairs(64)]
    tokenizer = ROOT / "demo/models/xcomet/encoder"
    build_checkpoint(
        folder, tokenizer, samples, seed=1, **XCOMET, hparams={"hidden_sizes": [512, 256]}
    )
    # Beside the checkpoint, as the demo's: the folder may then be moved.
    stored = torch.load(folder / "checkpoints/model.ckpt", weights_only=False)
    _check_size(stored["state_dict"])
    stored["hyper_parameters"]["pretrained_model"] = "encoder"
    torch.save(stored, folder / "checkpoints/model.ckpt")


def _make_metricx(folder: Path) -> None:
    import torch
    from transformers import AutoTokenizer, MT5Config, MT5ForConditionalGeneration

    source = ROOT / "demo/models/metricx"
    tokenizer = AutoTokenizer.from_pretrained(source)
    config = MT5Config.from_pretrained(source, **MT5, num_decoder_layers=MT5["num_layers"])
    config.tie_word_embeddings = False  # transformers 5 looks at no argument of that name
    torch.manual_seed(1)
    model = MT5ForConditionalGeneration(config).float().eval()
    model.set_input_embeddings(model.shared)  # transformers 5 gives each half its own
    _calibrate(model, tokenizer)
    _check_size(model.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _calibrate(model: Any, tokenizer: Any) -> None:
    """Move scores to around 12 with a spread of 4: inside the range, not clamped to its ends."""
    import torch

    pairs = read_pairs(64)
    seen: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0, 0]))
    with torch.no_grad():
        for pair in pairs:
            text = f"source: {pair.src} candidate: {pair.mt}"
            ids = torch.tensor([tokenizer(text)["input_ids"][:-1]])
            model(input_ids=ids, decoder_input_ids=torch.zeros(1, 1, dtype=torch.long))
        states = torch.stack(seen)  # [64, D]
        row = torch.randn(states.shape[1])
        row *= 4 / (states @ row).std()
        mean = states.mean(0)
        row += mean * (12 - mean @ row) / (mean @ mean)
        model.lm_head.weight[model.config.score_token_id] = row
    hook.remove()


def parameters_outside_embeddings(weights: dict[str, Any]) -> int:
    """Count the parameters that cost arithmetic for each token.

    Embedding tables and the output matrix do not count.
    """
    tables = ("embed", "shared.", "lm_head.")
    return sum(t.numel() for name, t in weights.items() if not any(part in name for part in tables))


def _check_size(weights: dict[str, Any]) -> None:
    num_parameters = parameters_outside_embeddings(weights)
    assert num_parameters in _WANTED, f"{num_parameters:,} parameters outside the embeddings"


if __name__ == "__main__":
    with clean_exit():
        for path in (xcomet(), metricx()):
            print(path)
