"""A page for people who look at the server with a browser: what is on it, and the routes that serve it."""
