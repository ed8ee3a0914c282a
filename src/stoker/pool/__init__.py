"""A cache on Valkey or Redis servers that all nodes share."""
