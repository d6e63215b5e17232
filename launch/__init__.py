"""The rooms of the launcher: settings, the machine, files, logs, processes, signals. `launcher.py` tells their story.

Nothing here imports torch, transformers, gRPC or the HTTP stack: `python launcher.py --help` must answer at once.
"""
