"""OpenAI's API on `/v1`: bodies, what they ask for, and how it is answered."""
