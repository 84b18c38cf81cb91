"""Search backends: by words, by vectors of page texts, by vectors of page images."""
