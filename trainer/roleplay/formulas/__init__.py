"""What each reward says of one reply, by looking at it; none of them asks anybody."""
