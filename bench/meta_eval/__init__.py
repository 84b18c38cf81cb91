"""What `meta-eval` says of the demo's metrics, and of random ones, on texts foreign to them."""
