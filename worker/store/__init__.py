"""The one place that changes state: every statement is one from ``sql/``, run here.

``database`` runs statements; ``jobs``, ``volumes``, ``connections``, ``outbox`` and
``installation`` say what each means. A write on behalf of a job names its fencing token; from a
worker that has lost the job it raises :class:`worker.store.database.LeaseLost`.
"""
