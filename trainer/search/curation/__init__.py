"""From the episodes of a round to the data of the next: what is kept, what is dropped, and why."""
