"""The two scoring routes of gemmax, answered by our services."""
