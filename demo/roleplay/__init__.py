"""The role-play demo: a policy with two kinds of faults, and which training mends which."""
