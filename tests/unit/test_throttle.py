"""How fast a job may go: as it asked for, until something else is said."""

from worker import throttle


def test_what_was_asked_for_holds_until_something_is_said() -> None:
    heard: list[int | None] = []
    one = throttle.Throttle(None)
    with one.heeded_by(lambda: heard.append(one.limit(7))):
        assert one.limit(7) == 7
        one.say({"bytes_per_second": 3})
        one.say({"bytes_per_second": 3})
        one.say({"bytes_per_second": None})
    one.say({"bytes_per_second": 5})
    assert heard == [3, None]
    assert one.limit(7) == 5


def test_what_was_said_before_it_began_holds_from_the_start() -> None:
    assert throttle.Throttle({"bytes_per_second": 2}).limit(None) == 2
    assert throttle.Throttle({"bytes_per_second": None}).limit(9) is None
