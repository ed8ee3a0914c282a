"""Imported, makes the process one that forks cheaply: the last that the fork server preloads."""

from tests.support.memory import settle

settle()
