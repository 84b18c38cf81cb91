"""The MetricX service: `python -m services.metricx`."""
