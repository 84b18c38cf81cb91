"""A client of OpenAI-compatible chat servers. Other packages import its names from here."""

from scorekit.llm.client import LLMClient, LLMCounts
from scorekit.llm.errors import LLMError
from scorekit.llm.wire import Choice, Message, Sampling, image_part, parse_json, text_part

__all__ = [
    "Choice",
    "LLMClient",
    "LLMCounts",
    "LLMError",
    "Message",
    "Sampling",
    "image_part",
    "parse_json",
    "text_part",
]
