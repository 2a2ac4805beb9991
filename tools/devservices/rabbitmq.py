from pathlib import Path
SERVER_PROGRAM = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
