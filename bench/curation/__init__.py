"""What the commands of curation take of a large store."""
