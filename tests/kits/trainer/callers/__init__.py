"""Callers of rewards: what trainers of other projects send, and do with the answer."""
