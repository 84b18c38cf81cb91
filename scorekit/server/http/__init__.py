"""The HTTP layer of a service: connections, limits, bodies, settings, metrics."""
