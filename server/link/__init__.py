"""What carries connections between the nodes of one launch: `python -P -m server.link`, one process a node.

Processes of a launch meet at unix sockets in its private folder. A link makes the sockets of other nodes appear there
as well: a process that dials such a socket here reaches, through two links and one TCP connection with mutual TLS, the
socket of that name on its own node. So nothing else knows of nodes: not the router, nor the stream of steps, the
pipeline, the rendezvous, and the launchers' own orders. What links say before bytes are passed on: `handshake.py`.

Left out: gloo and NCCL, which make connections of their own, and cannot be given ours.
"""
