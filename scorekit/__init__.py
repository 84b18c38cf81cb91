"""The shared core of the scoring services, the trainer and the synthesis driver."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("scorekit")
except PackageNotFoundError:  # run from a checkout that was not installed
    __version__ = "0.0.0"
