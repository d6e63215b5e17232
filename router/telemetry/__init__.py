"""Metrics, traces and log lines of requests, for operators."""
