"""Pictures as a policy sees them: frames, sizes, the letters that are large enough to read."""
