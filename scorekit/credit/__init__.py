"""Credit assignment: ids, a tokenizer and error spans become one number for each token.

Neither torch, transformers nor numpy is imported. Users import these names from here;
docs/how-to/reward-tokens.md shows them at work.
"""

from scorekit.credit.advantages import AdvantageNorm, compute_advantages
from scorekit.credit.assign import TokenCredit, assign_credit
from scorekit.credit.offsets import (
    Alignment,
    DecodeConfig,
    align_completion,
    compute_token_char_offsets,
    decode_completion,
)
from scorekit.credit.spans import (
    SEVERITY_WEIGHTS,
    combine_sources,
    covered_tokens,
    spans_to_token_rewards,
)

__all__ = [
    "SEVERITY_WEIGHTS",
    "AdvantageNorm",
    "Alignment",
    "DecodeConfig",
    "TokenCredit",
    "align_completion",
    "assign_credit",
    "combine_sources",
    "compute_advantages",
    "compute_token_char_offsets",
    "covered_tokens",
    "decode_completion",
    "spans_to_token_rewards",
]
