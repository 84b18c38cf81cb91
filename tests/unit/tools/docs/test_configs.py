"""The reference has every config key, and a class without a page is noticed."""

from __future__ import annotations

import pytest
from pydantic import Field

from scorekit.config import Config
from tools.docs.configs import PAGES, ConfigPage, config_page, is_plain_section, sections_of
from tools.docs.entries import anchor, escape
from tools.docs.errors import subclasses_of

#: Classes of files that a program writes, of a file of this repository, of another project's
#: config, and of no file.
NOT_FOR_USERS = {"Anchors", "Calibration", "MqmPrompt", "LoopEntry", "ScoringConfig"}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_every_key_with_its_meaning(name: str) -> None:
    page = config_page(PAGES[name])
    for section in sections_of(PAGES[name].config):
        for key, field in section.config.model_fields.items():
            path = f"{section.path}.{key}" if section.path else key
            if is_plain_section(field):
                assert f"## {path} {{ #{anchor(path)} }}" in page
            else:
                heading = page.index(f"### `{path}` {{ #{anchor(path)} .key }}")
                assert escape(field.description or "") in page[heading:]


def test_every_config_class_is_on_a_page() -> None:
    page_keys = {
        base.__name__
        for page in PAGES.values()
        for section in sections_of(page.config)
        for base in section.config.__mro__
    }
    declared = {node.name for node in subclasses_of("Config")}
    assert declared - page_keys - NOT_FOR_USERS == set()


def test_a_key_has_its_type_default_bounds_and_deep_link() -> None:
    page = config_page(PAGES["translation"])
    assert "### `rl.kl_coef` { #rl-kl_coef .key }\n\nnumber · default `0.05` · ≥ 0" in page


class _Undocumented(Config):
    """A config whose key has no description."""

    size: int = Field(1)


def test_a_key_without_a_description_is_refused() -> None:
    with pytest.raises(ValueError, match="size has no description"):
        config_page(ConfigPage("A", _Undocumented, "Read by nobody."))
