"""Policy optimization that does not depend on a task: ids, masks and advantages give gradient
steps."""
