"""The config rounds.yaml, with a description of each key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import Field, field_validator, model_validator

from scorekit.config import Config
from trainer.search.steps.table import IN_ROUND, step

#: The steps that may follow a round's training, in their order.
STEPS: Final = (*IN_ROUND, "sft")
if TYPE_CHECKING:
    Step = str
else:
    Step = Literal[STEPS]


def needed_by(name: str) -> str | None:
    """Return the step of the same round that a step requires, or None."""
    return "distill" if name == "sft" else step(name).needs


class RoundLimits(Config):
    """The budget of a round. The loop stops at a limit, and continues once it is raised."""

    calls: int | None = Field(None, ge=1, description="Calls of paid servers that were answered.")
    tokens: int | None = Field(None, ge=1, description="Tokens of them, as the servers count.")
    hours: float | None = Field(None, gt=0, description="Of work, all starts together.")


class RoundConfig(Config):
    """A training and the steps that use its episodes."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Of its folder.")
    config: str | None = Field(
        None, description="File of the training's config; null: the sections `train` alone."
    )
    train: dict[str, Any] = Field(
        default_factory=dict, description="Sections over that file, for this round alone."
    )
    then: list[Step] = Field(
        default_factory=list,
        description="What follows the training. It is done in this order, whatever the list's: "
        f"{', '.join(STEPS)}. The next round plays the rows that the last of focus and budget has "
        "kept (without them: this round's), and begins with what sft has left (without it: this "
        "training). What diagnose, hallucinations and verify decide is one record, which all steps "
        "behind them read, those of later rounds too.",
    )
    curation: dict[str, Any] = Field(
        default_factory=dict, description="Sections of these commands, for this round alone."
    )
    sft: dict[str, Any] = Field(
        default_factory=dict, description="Sections of SFT, for this round alone."
    )
    limits: RoundLimits = Field(default_factory=RoundLimits, description="Its budget.")

    @field_validator("then")
    @classmethod
    def _in_order(cls, value: list[Step]) -> list[Step]:
        if len(set(value)) < len(value):
            raise ValueError("a step is named twice")
        for name in value:
            needed = needed_by(name)
            if needed is not None and needed not in value:
                raise ValueError(f"{name} requires the rows of {needed}: name {needed}, too")
        return [name for name in STEPS if name in value]


class RoundsConfig(Config):
    """The config of a loop, which starts with `data.train` and `policy.path` of its first round."""

    rounds: list[RoundConfig] = Field(min_length=1, description="In their order.")
    train: dict[str, Any] = Field(
        default_factory=dict,
        description="Sections over the config of every round: servers, held-out questions, ...",
    )
    curation: dict[str, Any] = Field(
        default_factory=dict, description="Sections of the commands between the trainings."
    )
    sft: dict[str, Any] = Field(default_factory=dict, description="Sections of SFT.")
    launch: list[str] = Field(
        default_factory=list,
        description="What starts a training in place of Python, word by word: accelerate, launch, "
        "--num_processes, 8, ...; `-m trainer ...` is put behind it. SFT is one process, on the "
        "first GPU.",
    )

    @model_validator(mode="after")
    def _makes_sense(self) -> RoundsConfig:
        names = [item.name for item in self.rounds]
        duplicates = sorted({name for name in names if names.count(name) > 1})
        if duplicates:
            raise ValueError(f"rounds: {duplicates[0]!r} is the name of several rounds")
        return self
