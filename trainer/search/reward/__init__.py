"""From a finished episode to its reward, while others still search."""
