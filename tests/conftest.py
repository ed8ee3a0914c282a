"""Options of the whole test run."""

from __future__ import annotations

import signal

import pytest

# A shell starts what runs in its background with the first two ignored, nohup with the third, and
# children take that over; tests of signals want them as they are.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="make each of the survival tests run at least this long",
    )


@pytest.fixture
def soak(request: pytest.FixtureRequest) -> float:
    """Seconds that a survival test shall last at least; 0 unless --soak was given."""
    return float(request.config.getoption("--soak"))
