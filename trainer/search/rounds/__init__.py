"""The closed loop: rounds of training, and between them the commands that make the next data."""
