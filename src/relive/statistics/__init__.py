"""Statistics of episodes, running norms of fields, and the observers that update both with the steps of a buffer."""
