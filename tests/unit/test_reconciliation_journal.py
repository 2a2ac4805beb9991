"""What the rounds of reconciliation log: each finding when it is new, and when it is gone."""

from structlog.testing import capture_logs

from messages.findings import Finding, FindingKind
from worker.reconciliation import journal

AT = "host-a@fast"


def _found(subject: str, *, address: str = AT, repaired: bool | None = None) -> Finding:
    return Finding(
        kind=FindingKind.UNOWNED_EXPORT,
        address=address,
        subject=subject,
        what="it is there",
        action="end it",
        repaired=repaired,
    )


def _events(*rounds: list[Finding]) -> list[tuple[str, str]]:
    made = journal.Journal()
    with capture_logs() as logs:
        for found in rounds:
            made.note([AT, "host-a"], found)
    return [(entry["event"].partition(".")[2], entry["subject"]) for entry in logs]


def test_a_finding_is_logged_when_it_comes_and_when_it_goes() -> None:
    one, other = _found("x"), _found("y", address="host-a")
    assert _events([one], [one], [one, other], [other], []) == [
        ("found", "x"),
        ("found", "y"),
        ("gone", "x"),
        ("gone", "y"),
    ]


def test_what_was_repaired_at_once_is_no_news() -> None:
    assert _events([_found("x", repaired=True)], []) == []


def test_what_could_not_be_repaired_is_logged_until_it_is() -> None:
    failed, mended = _found("x", repaired=False), _found("x", repaired=True)
    assert _events([failed], [failed], [mended], []) == [("found", "x"), ("gone", "x")]
