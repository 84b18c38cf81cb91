"""Answers that cost money: each is paid for once, below a cap, and never lost."""
