"""How good a searcher is: figures of episodes, evaluations on held-out questions, pages of both."""
