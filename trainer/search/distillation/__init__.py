"""Turn rare successes into training rows, with rewritten thoughts."""
