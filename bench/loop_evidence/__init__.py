"""Whether the closed loop is worth its steps, beside the same trainings without them."""
