"""Building machine code and running programs with it."""
