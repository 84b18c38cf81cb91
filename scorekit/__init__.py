"""The shared core of the scoring services, the trainer and the synthesis driver."""

#: Stands here and is not asked of pip, which in an image has not installed this code.
__version__ = "0.1.0"
