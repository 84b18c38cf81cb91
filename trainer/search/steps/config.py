"""The config of the curation steps: the keys that they share, and a section of each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, create_model

from trainer.search.steps.shared_config import SharedConfig
from trainer.search.steps.table import STEPS, step

if TYPE_CHECKING:

    class CurationConfig(SharedConfig):
        """The config of all curation commands; each also has its own section."""

else:
    CurationConfig = create_model(
        "CurationConfig",
        __base__=SharedConfig,
        __module__=__name__,
        __doc__="The config of all curation commands; each also has its own section.",
        **{
            name: (
                step(name).config,
                Field(default_factory=step(name).config, description=f"`{name}`."),
            )
            for name in STEPS
        },
    )
