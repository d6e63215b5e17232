"""Anthropic's Messages API: bodies, what they ask for, and how it is answered."""
