"""Shared parts of all clients: an event loop in a thread, retries, and reports of outages."""
