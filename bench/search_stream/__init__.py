"""What streaming of rewards saves."""
