"""The search task, by the id `scorekit-search` for verifiers 0.4: exactly one class of each kind."""

from scorekit.adapters.verifiers_env import ChatHarness
from trainer.search.environment.verifiers_taskset import SearchEnv, SearchTaskset

__all__ = ["ChatHarness", "SearchEnv", "SearchTaskset"]
