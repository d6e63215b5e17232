"""The prefix cache behind the device, as the router knows it: what the host and the disk hold, and what moves."""
