"""Watch what derived inputs are made from, and say what they are."""
