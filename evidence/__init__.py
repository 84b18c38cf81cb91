"""Training runs that show what a reward teaches, each with a control and several seeds."""
