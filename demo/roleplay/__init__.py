"""The role-play demo: a policy with two kinds of errors, and which training repairs which."""
