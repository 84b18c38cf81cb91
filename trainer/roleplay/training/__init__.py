"""Training on TRL's GRPOTrainer: flags, options, the trainer, its checks and its files."""
