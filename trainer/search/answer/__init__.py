"""From evidence to an answer and its verdict, and what they cost."""
