"""OpenAI's Responses API: bodies, what they ask for, and how it is answered. Nothing is stored."""
