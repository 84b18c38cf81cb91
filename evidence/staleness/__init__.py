"""What the age of samples does to learning: bounds on staleness, a control, three seeds."""
