"""Chat templates: convert turns to ids, and check that the ends of turns are trained."""
