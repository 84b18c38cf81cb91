"""What a Korean reply says by its grammar: speech levels, who acts, what is asked."""
