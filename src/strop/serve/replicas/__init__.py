"""Let replicas on Ray Serve draw what one front takes in (``strop serve --ray``).

The front is the server of ``strop serve`` with another painter: guard, interfaces, line, batches,
limits and metrics are the same code. ``painter.py`` sends a batch to a replica, and to another one
if that dies; ``drawer.py`` is a replica; ``warmth.py`` says which replica is best for a batch, and
``router.py`` tells that to Ray. ``plan.py`` counts replicas; ``deployed.py`` puts it together.
"""
