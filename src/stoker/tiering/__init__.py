"""Transparent tiering: ``stoker run`` gives unmodified programs fast local copies of slow files."""
