"""What operators see of requests: metrics, traces, log lines."""
