"""The search task for verifiers 0.4, by the id `scorekit-search`: one class of each kind."""

from scorekit.adapters.verifiers import ChatHarness
from trainer.search.environment.verifiers_taskset import SearchEnv, SearchTaskset

__all__ = ["ChatHarness", "SearchEnv", "SearchTaskset"]
