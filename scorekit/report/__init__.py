"""Output for people: HTML pages in one style, errors in color, progress bars."""
