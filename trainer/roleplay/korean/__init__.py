"""Grammar of Korean replies: speech levels, the acting person, and questions."""
