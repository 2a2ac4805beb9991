"""The outside contract of volume-worker: what is said over RabbitMQ, and the means to say it.

Imports nothing of ``worker``: a scheduler can depend on this package alone.
"""
