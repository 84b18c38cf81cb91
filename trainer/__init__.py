"""Policy optimisation for translation: token-level PPO against scoring services named by URL."""
