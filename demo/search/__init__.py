"""The search demo: decks of real data, questions about them, a generator that reads images."""
