"""An NBD client of blocking calls, for threads. It imports little: the copier has to start fast."""
