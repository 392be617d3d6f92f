"""Other libraries' buffers on this library's core: their names, orders and conventions end here."""
