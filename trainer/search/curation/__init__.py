"""Select and build the data of the next round from the episodes of the last one."""
