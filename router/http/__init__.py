"""HTTP around the routes: connections, bodies, deadlines and streams, each bounded in size and time.

Events of a stream are written to the connection itself. A client that does not read is cut when too much waits for it
or one byte has waited for `unread_timeout`; what waits unread on all connections has a bound together.
"""
