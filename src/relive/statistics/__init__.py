"""Statistics of episodes, running norms of fields, and the part of a buffer that counts its steps in both."""
