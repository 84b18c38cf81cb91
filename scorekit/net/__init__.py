"""What every client of a service is built on: an event loop in a thread, second tries."""
