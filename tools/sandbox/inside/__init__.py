"""The worker: what runs inside of a sandbox. Sent there as text, imported there by nobody."""
