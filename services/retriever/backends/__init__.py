"""What searches the pages: by words, by vectors of their text, by vectors of their pictures."""
