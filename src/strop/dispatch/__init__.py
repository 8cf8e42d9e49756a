"""Lead from a call of a module to the program that serves it: guards, variants, training steps."""
