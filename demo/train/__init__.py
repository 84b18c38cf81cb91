"""Scripts that made the demo models: data, tokenizer, policy, candidates, metrics, evaluation."""
