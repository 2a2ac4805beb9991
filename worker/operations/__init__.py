"""One function a method: what the worker does when a job runs."""
