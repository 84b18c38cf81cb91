"""Vision policies of published sizes with random weights: their folders, and a short run of one."""
