"""Turn by turn: prompts, ids that are joined, policies, the episode."""
