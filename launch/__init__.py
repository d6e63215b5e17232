"""The launcher's parts: settings, the machine, files, logs, processes, signals, nodes. `launcher.py` connects them.

Nothing here imports torch, transformers, gRPC or the HTTP stack: `python launcher.py --help` must answer at once.
"""
