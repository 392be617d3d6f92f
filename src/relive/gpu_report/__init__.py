"""A report of one GPU, to send back: `python -m relive.gpu_report` checks and measures everything there."""
