"""The search demo's final test: documents and questions on which nothing was tuned."""
