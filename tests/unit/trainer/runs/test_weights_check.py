"""Check that a damaged config of a model is one line, whatever transformers raises."""

from __future__ import annotations

import pytest

from scorekit.errors import UserError
from trainer.chat.render import load_generation_config
from trainer.rl.config import PolicyConfig
from trainer.runs.checks import check_model


@pytest.mark.parametrize("content", ['{"model_type": "qwen2", "hidden_size": "abc"}', "[", "[1]"])
def test_a_damaged_config_is_one_line(content, tmp_path):
    """A field of another type is an error of huggingface_hub that is no OSError or ValueError."""
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"policy\.path: ") as raised:
        check_model(PolicyConfig(path=str(tmp_path)), str(tmp_path), "policy.path")
    assert "\n" not in str(raised.value)
    assert load_generation_config(str(tmp_path)) is None
