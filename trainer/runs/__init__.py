"""The folder of a run: checkpoints and going on from them, log, console, trackers, stop rules."""
