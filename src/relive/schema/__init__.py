"""The fields of a step: their declaration, the conversion of a caller's values, and the assembly of batches."""
