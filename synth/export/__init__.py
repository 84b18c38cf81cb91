"""The finished pairs: rows, files, card, upload."""
