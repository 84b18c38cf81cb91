"""What each of the five role-play rewards teaches, and what a policy makes of it without one."""
