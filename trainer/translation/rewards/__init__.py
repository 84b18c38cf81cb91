"""The reward of a translation: services, guards, error spans, and the formula over them."""
