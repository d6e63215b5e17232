"""The engine without HTTP: servers that are started for a measurement, and shards that are driven directly."""
