"""`scorekit score`: files of samples in, files of results out."""
