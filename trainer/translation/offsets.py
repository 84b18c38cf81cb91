"""Names of `scorekit.credit.offsets`, where users of the trainer have imported them from."""

from scorekit.credit.offsets import Alignment as Alignment
from scorekit.credit.offsets import DecodeConfig as DecodeConfig
from scorekit.credit.offsets import align_completion as align_completion
from scorekit.credit.offsets import compute_token_char_offsets as compute_token_char_offsets
from scorekit.credit.offsets import decode_completion as decode_completion
