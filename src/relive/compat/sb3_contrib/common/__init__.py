"""sb3-contrib's `common`: rollout buffers are ours, all other modules its own."""
