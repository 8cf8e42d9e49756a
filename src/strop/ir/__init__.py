"""Define the data that the stages hand to each other: sizes, graph, operator table, loop IR."""
