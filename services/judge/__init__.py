"""The judge service: verdicts by rules or by an LLM."""
