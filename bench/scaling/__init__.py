"""Simulates a training run with several samplers, services and batches ahead."""
