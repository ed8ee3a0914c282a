"""An epoch of one rank, from the plan to the books, whatever framework trains: no torch here."""
