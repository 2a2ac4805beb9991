"""Reconciliation: what is served, attached and running, compared with the records, and mended."""
