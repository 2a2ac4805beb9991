"""``python -m worker.cli``, for where the installed command is not on ``PATH``."""

from worker.cli import app

app.main()
