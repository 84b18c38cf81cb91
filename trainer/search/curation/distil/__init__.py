"""From rare successes to rows to learn from, and their thoughts in better words."""
