"""The stages in their order; each is a module with a class that synth/driver.py runs."""
