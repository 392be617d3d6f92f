"""sb3-contrib's `common.recurrent`, with our rollout buffers."""
