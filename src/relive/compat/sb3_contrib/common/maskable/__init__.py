"""Package on the import path of sb3-contrib's buffers."""
