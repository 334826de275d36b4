"""Units: further implementations of operators, of kinds that several operators share (Whale 3.2.2)."""
