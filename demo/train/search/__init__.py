"""The searcher of the search demo: scripted episodes, and its cold start on them."""
