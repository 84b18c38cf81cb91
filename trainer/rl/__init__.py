"""Policy optimisation that knows no task: ids, masks and advantages in, a better policy out."""
