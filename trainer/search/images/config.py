"""The section `sight` of a config: sizes of images and limits of crops."""

from __future__ import annotations

from pydantic import Field, model_validator

from scorekit.config import Config
from trainer.search.records import BoxConvention

#: Above this aspect, Qwen's processors return sizes beyond their own limits.
_LARGEST_ASPECT = 50.0


class SightConfig(Config):
    """The sizes of images and the limits of crops.

    They must be the same in training and evaluation, because boxes depend on them.
    """

    min_pixels: int = Field(
        200_704, ge=1, description="Least area of a picture as shown; smaller ones are enlarged."
    )
    max_pixels: int = Field(401_408, ge=1, description="Largest area of a picture as shown.")
    factor: int = Field(
        28,
        ge=1,
        description="Sides as shown are multiples of it: the patch of the model times its merge "
        "(Qwen2.5-VL 28, Qwen3-VL 32); 1 for a model that takes any size.",
    )
    box_convention: BoxConvention = Field(
        "pixel",
        description="How a box is written: in pixels of the picture last shown, or with its sides "
        "as 0-1000, or as 0-1.",
    )
    crop_padding: int = Field(
        28, ge=0, description="What is shown around a box on each side, in pixels as shown."
    )
    min_crop: int = Field(
        28, ge=1, description="Least side of a crop with its padding, in pixels of the page."
    )
    max_aspect: float = Field(
        _LARGEST_ASPECT,
        ge=1,
        le=_LARGEST_ASPECT,
        description="Of a crop, its longer side by the other.",
    )
    legible_px: float = Field(
        9.0,
        gt=0,
        description="With observation text: least font size, in pixels as shown, that is read.",
    )
    max_lines: int | None = Field(
        None,
        ge=1,
        description="With observation text: lines that are told of a picture; of those behind them "
        "only how many they are, and where a crop shows more. null: all.",
    )

    @model_validator(mode="after")
    def _sizes_are_possible(self) -> SightConfig:
        if self.max_pixels < 2 * self.min_pixels or self.min_pixels < self.factor**2:
            raise ValueError(
                "max_pixels must be at least twice min_pixels, and min_pixels at least factor "
                "squared. Otherwise some images have no size between them."
            )
        return self
