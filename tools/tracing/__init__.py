"""Traces which of our files run for one sample, prompt, question, sentence or step."""
