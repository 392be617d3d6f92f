"""Statistics of episodes, running norms of fields, and how buffers tell both of every step."""
