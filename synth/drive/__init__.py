"""How a stage is run: records in flight, the services that it asks, processes, a Ray cluster."""
