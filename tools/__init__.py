"""What is done with the original libraries of our adapters: their tests, their trainers, their words."""
