"""The `reward` section of a search run: the weights of the reward components."""

from __future__ import annotations

import math
import os
from typing import Final, Literal

from pydantic import Field, model_validator

from scorekit.config import Config

Preset = Literal["phase1", "phase2", "focused", "unified"]
Forced = Literal["score", "zero", "penalty"]
#: Pages that count as a hit: the gold page; any page of its document; the gold page or a page with
#: the same fact (`Question.alternatives`).
GoldUnit = Literal["page", "document", "alternatives"]
#: Preset -> weights of judge, NDCG and format; what a forced end earns. Where the form has a weight
#: it earns 0, because a right form ends with search_complete. Elsewhere the answer is still judged,
#: and the end costs something.
PRESETS: Final[dict[Preset, tuple[float, float, float, Forced]]] = {
    "phase1": (0.0, 0.9, 0.1, "zero"),
    "phase2": (0.8, 0.2, 0.0, "penalty"),
    "focused": (1.0, 0.0, 0.0, "penalty"),
    "unified": (0.4, 0.5, 0.1, "zero"),
}
#: Key of a weight -> the environment variable that may set it.
ENVIRONMENT: Final = {
    "w_judge": "RM_JUDGE_COEF",
    "w_ndcg": "RM_NDCG_COEF",
    "w_format": "RM_FORMAT_COEF",
}


class SearchRewardConfig(Config):
    """The reward of an episode: w_judge * score + w_ndcg * NDCG + w_format * well-formed.

    A weight comes from the config, else the environment, else the preset. forced_completion comes
    from the config, else the preset. A saved config has all.
    """

    preset: Preset = Field(
        "phase2",
        description="Weights of judge, NDCG and format where nothing else says them: phase1 "
        "0/0.9/0.1, phase2 0.8/0.2/0, focused 1/0/0, unified 0.4/0.5/0.1. Without a weight on the "
        "judge (phase1) neither generator nor judge is called.",
    )
    w_judge: float | None = Field(
        None, ge=0, description="Weight of the judge's score. Also RM_JUDGE_COEF."
    )
    w_ndcg: float | None = Field(None, ge=0, description="Weight of NDCG. Also RM_NDCG_COEF.")
    w_format: float | None = Field(
        None, ge=0, description="Weight of a well-formed episode. Also RM_FORMAT_COEF."
    )
    gate: bool | None = Field(
        None,
        description="An episode that is not well-formed earns 0, whatever else it did, and is not "
        "judged. Default: where format has a weight.",
    )
    ndcg_gold: GoldUnit = Field(
        "page",
        description="What counts as found: the gold page; any page of its document; or the gold "
        "page and those of `alternatives`. Each gold counts once.",
    )
    forced_completion: Forced | None = Field(
        None,
        description="An episode that did not end itself (its turns were used up, or its context): "
        "score: earns what it earns; zero: 0, and is not judged; penalty: forced_penalty is taken "
        "off. Default: the preset's, which is zero for phase1 and unified, penalty for phase2 and "
        "focused.",
    )
    forced_penalty: float = Field(
        0.1, ge=0, description="Taken off under forced_completion: penalty; may go below 0."
    )

    @model_validator(mode="after")
    def _resolve(self) -> SearchRewardConfig:
        *weights, forced_end = PRESETS[self.preset]
        for key, value in zip(ENVIRONMENT, weights, strict=True):
            if getattr(self, key) is None:
                from_environment = _from_environment(ENVIRONMENT[key])
                setattr(self, key, value if from_environment is None else from_environment)
        if self.forced_completion is None:
            self.forced_completion = forced_end
        if self.gate is None:
            self.gate = bool(self.w_format)
        if not (self.w_judge or self.w_ndcg or self.w_format):
            raise ValueError(
                "all weights are 0, so every reward would be 0. Set w_judge, w_ndcg or w_format."
            )
        return self

    @property
    def weights(self) -> dict[str, float]:
        """Return the weight of each reward component."""
        return {key.removeprefix("w_"): getattr(self, key) for key in ENVIRONMENT}


def _from_environment(name: str) -> float | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"environment variable {name}: expected a number >= 0")
    return value
