"""The load client of `serving`: what is sent and when, over HTTP, and what became of it."""
