"""The search demo: decks of real figures, questions about them, a generator that reads pictures."""
