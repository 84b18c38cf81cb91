"""xCOMET as a service: sentence scores and error spans."""
