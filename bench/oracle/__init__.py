"""unbabel-comet in its own environment, for comparisons."""
