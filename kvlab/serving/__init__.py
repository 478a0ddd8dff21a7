"""Everything that imports vLLM; nothing outside this package does, and importing it does not either."""

from kvlab.serving.server import Server, launch, serve_command

__all__ = ["Server", "launch", "serve_command"]
