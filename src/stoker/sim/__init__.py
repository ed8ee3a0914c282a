"""Replay of the production policies and samplers without storage, and what no cache can exceed."""
