"""The reward of a translation: services, guards, error spans, and the formula over them."""


def metricx_reward(score: float, offset: float = 5.0) -> float:
    """Return offset - score: the reward of TranslateGemma (arXiv 2601.09012, section 4)."""
    return offset - score
