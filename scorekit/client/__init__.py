"""Clients of the services, async and not async. Users import them from here."""

from scorekit.client.asynchronous import ScoringClient
from scorekit.client.deduplication import Sample
from scorekit.client.embeddings import EmbeddingModel, Embeddings
from scorekit.client.sync import RemoteScorer, SyncScoringClient, resolve_scorer
from scorekit.scorers import raise_for_failures

__all__ = [
    "EmbeddingModel",
    "Embeddings",
    "RemoteScorer",
    "Sample",
    "ScoringClient",
    "SyncScoringClient",
    "raise_for_failures",
    "resolve_scorer",
]
