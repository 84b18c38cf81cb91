"""Check references with a verifier, the generator and the judge. People decide in the end."""
