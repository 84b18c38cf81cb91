"""A client of OpenAI-compatible chat servers. What others import is here."""

from scorekit.llm.client import LLMClient, LLMCounts
from scorekit.llm.errors import LLMError
from scorekit.llm.wire import Choice, Sampling, parse_json

__all__ = ["Choice", "LLMClient", "LLMCounts", "LLMError", "Sampling", "parse_json"]
