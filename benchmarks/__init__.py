"""Timings of relive and its peers, interleaved in one run, after a check that their results are equal."""
