"""Run a stage: records in flight, service clients, processes, a Ray cluster."""
