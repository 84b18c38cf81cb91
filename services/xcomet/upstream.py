"""`--implementation unbabel-comet`: build a checkpoint's class with unbabel-comet itself.

It needs a separate environment (`make env-oracle`). Our networks are tested against it.
unbabel-comet has no DeBERTa, the encoder of xCOMET-lite: Larionov et al. 2024, "xCOMET-lite:
Bridging the Gap Between Efficiency and Quality in Learned MT Evaluation Metrics" (arXiv
2406.14553), mDeBERTa-v3-base under xCOMET's heads. This module adds it. Texts are joined as in BERT
([CLS] a [SEP] b [SEP]), and as in its BERT two positions fewer are read than exist.
"""

from __future__ import annotations

from importlib.util import find_spec
from inspect import signature
from typing import Any

from scorekit.errors import UserError
from services.xcomet.checkpoint import Checkpoint


def check_installed() -> None:
    """Raise UserError if unbabel-comet cannot be imported."""
    if find_spec("comet") is None:
        raise UserError(
            "--implementation unbabel-comet: unbabel-comet is not installed here; run "
            "`make env-oracle` and start the service with .venv-oracle/bin/python"
        )


def build(checkpoint: Checkpoint, stored: dict[str, Any], overrides: dict[str, Any]) -> Any:
    """Return upstream's class with uninitialized weights, so that their memory is not touched.

    stored: the checkpoint's hyper-parameters.
    overrides: values that replace some of them."""
    from comet.models import str2model
    from transformers.modeling_utils import no_init_weights  # type: ignore[attr-defined] # of 4

    register_deberta()
    accepted = signature(str2model[checkpoint.kind].__init__).parameters
    arguments = {name: value for name, value in stored.items() if name in accepted} | overrides
    arguments |= {
        "load_pretrained_weights": False,
        "local_files_only": checkpoint.encoder_is_local,
    }
    with no_init_weights():
        return str2model[checkpoint.kind](**arguments)


def register_deberta() -> None:
    """Let unbabel-comet build models whose `encoder_model` is DeBERTa."""
    from comet.encoders import BERTEncoder, str2encoder
    from comet.encoders.base import Encoder
    from transformers import AutoTokenizer, DebertaV2Config, DebertaV2Model

    if "DeBERTa" in str2encoder:
        return

    class DebertaEncoder(BERTEncoder):  # type: ignore[misc]
        """A DeBERTa encoder for inference only."""

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
            """Return an encoder, with the interface of unbabel-comet's encoders."""
            return cls(pretrained_model, load_pretrained_weights, local_files_only)

        def forward(self, input_ids: Any, attention_mask: Any, **_: Any) -> dict[str, Any]:
            """Return what upstream's heads read; mDeBERTa has no token types."""
            layers = self.model(input_ids, attention_mask, output_hidden_states=True).hidden_states
            return {
                "sentemb": layers[-1][:, 0],
                "wordemb": layers[-1],
                "all_layers": layers,
                "attention_mask": attention_mask,
            }

    str2encoder["DeBERTa"] = DebertaEncoder
