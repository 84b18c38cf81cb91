"""Chat templates: turns to ids, and whether a template lets a model learn where a turn ends."""
