"""Benchmarks: one script a question; prints a table and writes JSON under bench/results/."""
