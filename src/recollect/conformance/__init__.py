"""What a correct experience buffer does, asked of this library and of its peers."""
