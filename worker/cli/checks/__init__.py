"""What ``volume-worker check`` looks at. Nothing here disturbs a worker that runs."""
