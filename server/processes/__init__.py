"""What every process of a server does with Linux and with its log."""
