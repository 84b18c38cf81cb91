"""Translation for verifiers 0.4, by the id `scorekit-translation`: one class of each kind."""

from scorekit.adapters.verifiers import ChatHarness, ScoredEnv
from trainer.translation.verifiers_taskset import TranslationTaskset

__all__ = ["ChatHarness", "ScoredEnv", "TranslationTaskset"]
