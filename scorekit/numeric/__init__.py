"""Numbers that decide: vectors of texts, and means beside the thresholds of a config."""
