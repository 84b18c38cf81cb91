"""The stages in their order; each is a module with a class that synth/drive/driver.py runs."""
