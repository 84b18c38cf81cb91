"""The stages: each a module that states all of its own; `table.py` has their order."""
