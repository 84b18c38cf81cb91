"""Samples over a model's limit, scored in windows of sentences (`overlong: windows`)."""
