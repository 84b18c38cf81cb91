"""Names of `scorekit.credit.spans`, where users of the trainer have imported them from."""

from scorekit.credit.spans import covered_tokens as covered_tokens
from scorekit.credit.spans import severity_weight as severity_weight
from scorekit.credit.spans import spans_to_token_rewards as spans_to_token_rewards
