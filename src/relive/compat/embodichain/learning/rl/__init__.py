"""Package on the import path of EmbodiChain's buffers."""
