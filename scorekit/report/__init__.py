"""What people look at: HTML pages of one look, errors in colour, progress bars."""
