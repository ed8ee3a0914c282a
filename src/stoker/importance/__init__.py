"""Importance: from what training shows about a sample to its score."""
