"""The documentation site: its pages are assembled, and its reference is generated from the code."""
