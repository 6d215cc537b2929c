"""Sandboxes: where code that nobody trusts runs, with its state, for one session."""
