"""The launcher's parts: settings, the machine, files, logs, processes, signals, nodes. `launcher.py` connects them.

Nothing here imports torch, transformers, gRPC or the HTTP stack: `python launcher.py --help` must answer at once.

* **Settings** (`config.py`, `settings.py`, `flags.py`) are the fields of the configs of launcher, router and shards.
  What becomes of TGI's, and of other servers' options, is data in `compatibility/`.
* **Before anything loads**: the port is bound, so that a taken port is known in a second, and the model is resolved
  (`models.py`). Only the router listens on the port, and only once the model can answer.
* **Files**: sockets, rendezvous and settings of shards are in a private folder per launch (`files.py`). The router's
  settings hold the API key and reach it in a file without a name.
* **Processes**: children die with the launcher, whatever kills it (`PR_SET_PDEATHSIG`). Shards are forks of one
  process that has imported torch (`fork_server.py`); `ps -o comm` calls them `shard-0` and so on.
* **Deaths**: a lost shard costs its group, which `supervisor.py` and `restarts.py` replace. A router that dies, or is
  silent for ten seconds, is started again beside the shards; its first step tells them to forget every sequence.
* **Logs**: each process writes JSON lines into a pipe of its own, and the launcher prints them. Neither waits for its
  reader: up to 1 MiB waits, what is more is dropped and counted; records that the launcher acts on are kept.
* **Nodes**: only launchers know of nodes (`nodes.py`, `remote_nodes.py`, `node_agent.py`, `node_links.py`). That of
  node 0 tells the others which shards to start and hears how they end; a node that is silent has lost its shards.
"""
