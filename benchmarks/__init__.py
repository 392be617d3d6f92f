"""Timings of relive and its peers, interleaved in one run, after their results were found equal."""
