"""Documents and questions on which nothing was tuned: the search demo's final test."""
