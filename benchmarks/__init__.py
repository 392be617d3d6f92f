"""Speed beside the peers, measured in one interleaved run after their results were found equal."""
