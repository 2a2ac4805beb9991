"""What a worker tells about itself: logs and health."""
