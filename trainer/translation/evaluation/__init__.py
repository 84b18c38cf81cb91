"""How good a translation policy is: figures, comparisons, pages."""
