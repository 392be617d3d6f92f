"""sb3-contrib's `common.maskable`, with our rollout buffers."""
