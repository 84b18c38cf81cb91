"""Scripts that made the role-play demo: dialogues, their faults, a sentence encoder, a policy."""
