"""Lead from the user's program to the graph IR: capture, symbolic sizes, decompositions, import."""
