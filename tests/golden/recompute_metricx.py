"""Recompute golden.json in float64 by upstream's own code; no test runs this.

In an environment with transformers 4.30.2 (upstream's pin), from a checkout of
github.com/google-research/metricx:

    PYTHONPATH=CHECKOUT:. python -m tests.golden.recompute_metricx
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.kits.float64 import float64
from tests.kits.metricx_checkpoints import expand_golden

FOLDER = Path(__file__).parent / "metricx_tiny"
MODES = ("qe", "ref")


def text(pair: dict[str, Any], mode: str) -> str:
    """Return the text that upstream's predict.py makes of a pair."""
    plain = f"source: {pair['source']} candidate: {pair['hypothesis']}"
    return plain if mode == "qe" else f"{plain} reference: {pair['reference']}"


def main() -> None:
    """Write the scores, and print the distance of the float32 scores from them."""
    from metricx24.models import MT5ForRegression  # type: ignore[import-not-found]
    from transformers import AutoTokenizer

    file = FOLDER / "golden.json"
    golden = json.loads(file.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        expand_golden(FOLDER, Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        single = MT5ForRegression.from_pretrained(folder).eval()
        double = MT5ForRegression.from_pretrained(folder).eval().double()
    max_difference = 0.0
    for pair in golden["pairs"]:
        for mode in MODES:
            limit = golden["max_input_length"]
            token_ids = tokenizer(text(pair, mode), max_length=limit, truncation=True)["input_ids"]
            ids = torch.tensor([token_ids[:-1]])
            assert ids.shape[1] == pair[f"{mode}_n_tokens"]
            with torch.no_grad(), float64():
                low, high = (
                    model(input_ids=ids, attention_mask=torch.ones_like(ids)).predictions.item()
                    for model in (single, double)
                )
            max_difference = max(max_difference, abs(low - high))
            pair[mode] = high
    file.write_text(json.dumps(golden, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
    print(f"float32 lies within {max_difference:.1e} of float64 on this machine")


if __name__ == "__main__":
    main()
