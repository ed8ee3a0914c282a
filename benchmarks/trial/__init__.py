"""A fair trial of all recipes: who takes part, one training, intervals, tables and plots."""
