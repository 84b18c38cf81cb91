"""Check that configs/search/curation.yaml has every key of every command at its default."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import BaseModel

from scorekit.config import load_config
from trainer.search.steps.config import CurationConfig

PATH = Path(__file__).parents[5] / "configs/search/curation.yaml"
#: Sections that runs also have; the file has only the keys that are likely to differ.
_RUN_SECTIONS = {"data", "answering", "retriever"}


def test_the_file_has_all_keys_at_their_defaults() -> None:
    assert load_config(CurationConfig, PATH) == CurationConfig()
    sections = yaml.safe_load(PATH.read_text(encoding="utf-8"))
    cfg = CurationConfig()
    for name in CurationConfig.model_fields.keys() - _RUN_SECTIONS:
        assert name in sections, f"{name} is missing"
        section = getattr(cfg, name)
        if isinstance(section, BaseModel):
            assert sections[name].keys() == type(section).model_fields.keys(), name


def test_each_command_with_a_section_stands_in_the_docs() -> None:
    docs = (PATH.parents[2] / "docs/how-to/curate.md").read_text(encoding="utf-8")
    sections = [
        name
        for name in CurationConfig.model_fields.keys() - _RUN_SECTIONS
        if isinstance(getattr(CurationConfig(), name), BaseModel)
    ]
    assert sections and all(f"scorekit search {name} " in docs for name in sections)
