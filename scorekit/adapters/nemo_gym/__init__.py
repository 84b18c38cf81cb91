"""A resources server of NeMo Gym whose `verify` is a composite reward."""
