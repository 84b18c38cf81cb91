"""From the socket to the queue and back: connections, limits, bodies, settings, metrics."""
