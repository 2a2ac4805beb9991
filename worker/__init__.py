"""The service that runs on each storage host."""
