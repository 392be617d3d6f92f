"""Runs the tests and trainers of the libraries that our adapters stand in for, and compares their words with ours."""
