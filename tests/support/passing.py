"""What a process of ours gets of what it is given."""

import os
from typing import Any

from stoker.node.child import dumped, load


def passed_on(job: object) -> Any:
    """Return ``job`` as a child process gets it."""
    with dumped(job) as given:
        return load([os.dup(fd) for fd in given])
