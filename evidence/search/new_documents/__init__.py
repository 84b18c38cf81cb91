"""Questions of search's evidence: 320 about documents that no training asks about."""
