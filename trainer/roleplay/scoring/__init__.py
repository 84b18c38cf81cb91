"""The formulas of the rewards of one reply; they make no requests."""
