"""Curation: steps that select and build the data of the next round from episodes."""
