"""Images as the policy gets them: frames, sizes, and the lines that are large enough to read."""
