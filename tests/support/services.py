"""The node's service in this process, as long as a test needs it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from stoker.jobs.service import Service, ServiceSettings


@contextmanager
def serving(**settings: Any) -> Iterator[Service]:
    """Run a service with these settings, in a thread."""
    with Service(ServiceSettings(**settings)) as service:
        thread = threading.Thread(target=service.run)
        thread.start()
        try:
            yield service
        finally:
            service.stop()
            thread.join()
