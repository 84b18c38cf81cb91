"""Run episodes turn by turn: prompts, joined ids, policies."""
