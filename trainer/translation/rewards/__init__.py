"""What a translation earns: services, guards, error spans, and the formula over them."""
