"""The encoder of xCOMET-lite, which unbabel-comet does not have: DeBERTa-v2/v3 (mDeBERTa).

Larionov et al. 2024, "xCOMET-lite: Bridging the Gap Between Efficiency and Quality in Learned MT
Evaluation Metrics" (arXiv 2406.14553): mDeBERTa-v3-base under xCOMET's heads. Texts are joined as
BERT joins them ([CLS] a [SEP] b [SEP]), and as with unbabel-comet's BERT two positions fewer are
read than the encoder has.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Let unbabel-comet build models whose `encoder_model` is DeBERTa."""
    from comet.encoders import BERTEncoder, str2encoder
    from comet.encoders.base import Encoder
    from transformers import AutoTokenizer, DebertaV2Config, DebertaV2Model

    if "DeBERTa" in str2encoder:
        return

    class DebertaEncoder(BERTEncoder):  # type: ignore[misc]
        """For inference: of it our taps read `model`, `tokenizer` and the sizes."""

        def __init__(self, pretrained_model: str, load_pretrained_weights: bool, local: bool):
            super(Encoder, self).__init__()
            assert not load_pretrained_weights
            self.tokenizer = AutoTokenizer.from_pretrained(
                pretrained_model, use_fast=True, local_files_only=local
            )
            config = DebertaV2Config.from_pretrained(pretrained_model, local_files_only=local)
            self.model = DebertaV2Model(config)

        @classmethod
        def from_pretrained(
            cls,
            pretrained_model: str,
            load_pretrained_weights: bool = False,
            local_files_only: bool = False,
        ) -> Any:
            """As every encoder of unbabel-comet is made."""
            return cls(pretrained_model, load_pretrained_weights, local_files_only)

        def forward(self, input_ids: Any, attention_mask: Any, **_: Any) -> dict[str, Any]:
            """What upstream's own heads read; mDeBERTa has no token types."""
            layers = self.model(input_ids, attention_mask, output_hidden_states=True).hidden_states
            return {
                "sentemb": layers[-1][:, 0],
                "wordemb": layers[-1],
                "all_layers": layers,
                "attention_mask": attention_mask,
            }

    str2encoder["DeBERTa"] = DebertaEncoder
