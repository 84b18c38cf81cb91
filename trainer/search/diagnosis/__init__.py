"""Find out why questions score low, and which references are wrong."""
