"""Run the tests and trainers of the original libraries on our adapters, and compare their texts with ours."""
