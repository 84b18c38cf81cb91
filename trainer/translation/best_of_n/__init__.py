"""Several translations of each source: what there is to gain by choosing, and SFT on the chosen."""
