"""What a searcher learns from which reward, and that it learns nothing from rewards of others."""
