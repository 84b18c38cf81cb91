"""What windows of sentences lose, and how well their borders are aligned."""
