"""Turn a finished episode into its reward while other episodes still run."""
