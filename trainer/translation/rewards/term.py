"""The names that components of the reward had in version 0.2, for code that imports them."""

from trainer.translation.rewards.component import RewardComponent as Term
from trainer.translation.rewards.component import TextComponent as TextTerm

__all__ = ["Term", "TextTerm"]
