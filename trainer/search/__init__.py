"""Reinforcing a searcher: a policy that finds evidence in document pages for a frozen generator."""
