"""Private development services: RabbitMQ and PostgreSQL below `.services/` of the checkout."""
