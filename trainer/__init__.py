"""Training with rewards from scoring services: three trainers that share runs and checkpoints.

translation: a translation policy, by token-level PPO. roleplay: a role-play policy, by GRPO on TRL.
search: a multi-turn searcher, by GRPO or GSPO. They share run directories, checkpoints, logs and
the clients of reward services, which a config names by URL. sft fine-tunes a policy before RL.
"""
