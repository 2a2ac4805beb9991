"""How a volume is exported to other hosts."""
