"""Supervised fine-tuning on TRL's SFTTrainer."""
