"""The folder of a run: checkpoints, resuming, logs, console, trackers and stop rules."""
