"""The main job on small real models: `make demo`."""
