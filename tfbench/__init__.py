"""tfbench: how fast this machine trains, how sure that is, and where the rest of the time went."""

__version__ = "0.1.0"
