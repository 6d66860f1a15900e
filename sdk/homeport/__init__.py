"""Homeport: keeps an agent's prompt prefix still, its session at home, and the books on both."""

from homeport._version import __version__

__all__ = ["__version__"]
