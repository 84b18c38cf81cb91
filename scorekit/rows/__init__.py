"""The rows of files, folders and datasets, read in one way for commands, trainers and pages."""
