"""Turn fusion groups into loop IR."""
