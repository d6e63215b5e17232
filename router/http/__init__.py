"""HTTP around the routes: connections, bodies, streams of events, errors, and the application."""
