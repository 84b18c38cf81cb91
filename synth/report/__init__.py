"""What people look at: tables, reasons, estimates, the page of a run."""
