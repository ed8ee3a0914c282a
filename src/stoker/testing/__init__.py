"""Conformance classes, reference models and fakes; ships with the library."""
