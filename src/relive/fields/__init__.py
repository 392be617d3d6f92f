"""What a step is made of: declared fields, conversion of what a caller passes, and batches of what was stored."""
