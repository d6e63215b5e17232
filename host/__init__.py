"""What Lockstep asks of the operating system: processes, logs, output that never blocks, private folders."""
