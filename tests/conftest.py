"""What all tests need."""

from __future__ import annotations

import signal

# A shell that starts the tests in the background makes them ignore Ctrl-C, and with them every process they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
