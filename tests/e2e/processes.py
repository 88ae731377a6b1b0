"""The processes of a server, which runs in a session of its own."""

import os
import time

import psutil


def family(session: int) -> dict[int, str]:
    """Ids and names of the living processes of a session."""
    found = {}
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = process.name()
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return found


def left(session: int, seconds: float = 90) -> dict[int, str]:
    """Those that are still there after so long, ended then; the wait is over when none is."""
    deadline = time.monotonic() + seconds
    while (found := family(session)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in found:
        psutil.Process(pid).kill()
    return found
