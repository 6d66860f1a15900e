"""The session book: how many requests sessions bring."""

import pytest

from homeport_proxy.routing.sessions import SessionTable


@pytest.mark.parametrize(
    ("requests", "mean"),
    [
        ([], 1.0),
        ([1], 1.0),
        ([1, 2, 6], 3.0),
        ([10] * 300, 10.0),
        ([40] * 300 + [1] * 600, 1.0),  # what was long ago does not count
        ([1] * 100 + [100_000], 2.0),  # nor all of a session without end
    ],
)
def test_mean_requests_of_recent_sessions(requests: list[int], mean: float) -> None:
    table = SessionTable(3600.0, 10_000)
    for number, count in enumerate(requests):
        session = table.known_or_new(f"s{number}", 0.0)
        for _ in range(count):
            table.used(session, 0.0)
    assert table.mean_requests == pytest.approx(mean, rel=0.15)


def test_requests_of_sessions_that_go_on_count_with_theirs() -> None:
    table = SessionTable(3600.0, 10_000)
    sessions = [table.known_or_new(f"s{number}", 0.0) for number in range(20)]
    for _ in range(30):
        for session in sessions:
            table.used(session, 0.0)
    assert table.mean_requests == pytest.approx(30.0, rel=0.15)
