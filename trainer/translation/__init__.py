"""The translation trainer: prompts of sentences, rewards by MetricX and xCOMET, PPO, evaluation."""
