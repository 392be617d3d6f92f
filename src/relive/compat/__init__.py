"""Other libraries' signatures on our core, one module each."""
