"""The HTTP APIs, a folder for each: its routes, the bodies of requests, answers, and streams."""
