"""Policy optimization for any task: ids, masks and advantages give gradient steps."""
