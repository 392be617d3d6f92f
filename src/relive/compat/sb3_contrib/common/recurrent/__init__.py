"""A part of the path that sb3-contrib has its buffers at."""
