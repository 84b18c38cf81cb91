"""The server half of scorekit: needs the extra `server`; nothing else in scorekit imports it."""
