"""Reports for people: tables, reasons, estimates, the page of a run."""
