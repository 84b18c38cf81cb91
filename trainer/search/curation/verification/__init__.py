"""Is the reference right? A verifier and the generator answer, and the judge compares; people
overrule."""
