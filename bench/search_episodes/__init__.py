"""What an episode of the search task costs beside its policy and its neighbours."""
