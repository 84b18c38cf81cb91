"""Translation: prompts of sentences, rewards by MetricX and by the spans of xCOMET, evaluation."""
