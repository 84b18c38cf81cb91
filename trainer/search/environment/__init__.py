"""The search episode without a trainer, for the bindings of other trainers."""
