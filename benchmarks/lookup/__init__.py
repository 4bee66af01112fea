"""The jagged embedding lookup against fbgemm's, and the bytes that FP16 rows save; see `__main__`."""
